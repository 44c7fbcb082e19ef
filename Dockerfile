# docker build -t maxpipe .                        CPU
# docker build -t maxpipe --build-arg EXTRAS=tpu . TPU; EXTRAS=cuda for NVIDIA GPUs
# docker run --rm -v "$PWD/runs:/home/maxpipe/runs" maxpipe train configs/quickstart.yml
FROM python:3.12-slim

ARG EXTRAS=""
WORKDIR /opt/maxpipe
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY maxpipe maxpipe
RUN pip install --no-cache-dir -c constraints/py312.txt ".${EXTRAS:+[$EXTRAS]}"

RUN useradd --create-home maxpipe
USER maxpipe
WORKDIR /home/maxpipe
COPY --chown=maxpipe configs configs
RUN mkdir runs
ENTRYPOINT ["maxpipe"]
CMD ["--help"]
