# docker build -t maxpipe .                        CPU
# docker build -t maxpipe --build-arg EXTRAS=tpu . TPU; EXTRAS=cuda for NVIDIA GPUs
# docker run --rm -v "$PWD/runs:/home/maxpipe/runs" maxpipe train quickstart
FROM python:3.12-slim AS wheel
WORKDIR /opt/maxpipe
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY configs configs
COPY maxpipe maxpipe
RUN pip wheel --no-cache-dir --no-deps --wheel-dir dist .

FROM python:3.12-slim
ARG EXTRAS=""
WORKDIR /opt/maxpipe
COPY constraints constraints
COPY --from=wheel /opt/maxpipe/dist dist
RUN pip install --no-cache-dir -c constraints/py312.txt "$(ls dist/*.whl)${EXTRAS:+[$EXTRAS]}"

RUN useradd --create-home maxpipe
USER maxpipe
WORKDIR /home/maxpipe
RUN mkdir runs
ENTRYPOINT ["maxpipe"]
CMD ["--help"]
