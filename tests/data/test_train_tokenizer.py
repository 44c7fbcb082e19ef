"""`maxpipe tokenizer`: training is deterministic and writes complete output or none."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data import train_tokenizer
from maxpipe.data.tokenizer import open_tokenizer
from tests.errors import without_codes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GOLDEN = ROOT / "tests/golden/tokenizers"
Capture = pytest.CaptureFixture[str]
UNSEEN = "naïve 語 😀 \x00\t<|end_of_text|> 1234567"


def train(*arguments: str) -> int:
    return main(["tokenizer", "train", *arguments])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write a corpus as a text file and as JSON lines."""
    pages = sorted((DOCS / "guides" / "data").glob("*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages) + "naïve café\n" * 9
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.md").write_text(text, encoding="utf-8")
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/a.jsonl").write_text(json.dumps({"body": text}) + "\n")
    return tmp_path


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_train_writes_vocabulary(kind: str, corpus: Path, capsys: Capture) -> None:
    out = corpus / "a b"
    common = ["--vocab-size", "389", "--kind", kind, "--out"]
    assert train(str(corpus / "text"), *common, str(out)) == 0
    said = capsys.readouterr()
    assert f"wrote {out}: 389 token IDs\n" in said.out and not said.err
    assert f"tokenizer.kind=huggingface 'tokenizer.path={out}' model.vocab_size=389" in said.out
    tokenizer = open_tokenizer(TokenizerConfig(kind="huggingface", path=str(out)))
    assert tokenizer.vocab_size == 389 and tokenizer.special_ids == {0, 1, 2}
    ids = tokenizer.encode(UNSEEN)
    assert tokenizer.decode(ids) == UNSEEN and not {*ids.tolist()} & tokenizer.special_ids
    text = (corpus / "text/a.md").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode()) > 1.3 * len(ids)

    # The same text from JSON lines gives the same file.
    again = ["--field", "body", *common, str(corpus / "c")]
    assert train(str(corpus / "lines/*.jsonl"), *again) == 0
    assert (corpus / "c/tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
    assert {each.name for each in corpus.iterdir()} == {"text", "lines", "a b", "c"}


def test_train_rejects_nonempty_output_folder(corpus: Path, capsys: Capture) -> None:
    out = corpus / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    assert train(str(corpus / "text"), "--vocab-size", "300", "--out", str(out)) == 2
    assert without_codes(capsys.readouterr().err).splitlines() == [
        f"command line: --out = {out}",
        "  must not exist, or must be an empty folder.",
        f"  Choose another folder, such as --out {out}-2.",
    ]
    assert [each.name for each in out.iterdir()] == ["mine"]


def test_train_rejects_invalid_arguments(corpus: Path, capsys: Capture) -> None:
    (corpus / "text/b.jsonl").write_text('{"text": "a"}\n')
    (corpus / "empty.jsonl").write_text('{"text": ""}\n')
    for file, size, said in [
        ("text", "300", "found jsonl and text"),
        ("text/a.md", "258", "must be between 259"),
        ("empty.jsonl", "300", "all of them empty"),
        ("nothing", "300", "0 files match"),
        ("lines", "300", "text in data.text_field (text)"),
    ]:
        out = corpus / "out"
        assert train(str(corpus / file), "--vocab-size", size, "--out", str(out)) == 2
        err = capsys.readouterr().err
        assert said in err and len(err.splitlines()) == 3
        assert not out.exists()


def test_train_on_small_corpus_gives_fewer_tokens(corpus: Path, capsys: Capture) -> None:
    (corpus / "a.txt").write_text("ab ab ab\n")
    out = corpus / "out"
    assert train(str(corpus / "a.txt"), "--vocab-size", "999", "--out", str(out)) == 0
    assert "too little text for 999 token IDs" in capsys.readouterr().out


def test_train_reports_unwritable_output_folder(corpus: Path, capsys: Capture) -> None:
    out = corpus / "text/a.md/out"
    assert train(str(corpus / "text"), "--vocab-size", "300", "--out", str(out)) == 74
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.long
def test_interrupted_training_leaves_no_files(corpus: Path) -> None:
    text = (corpus / "text/a.md").read_text(encoding="utf-8")
    with open(corpus / "large.txt", "w", encoding="utf-8") as stream:
        stream.writelines(f"{text}{i * 7919}" for i in range(4000))
    code = "import sys; from maxpipe.telemetry import console; console._LINE_SECONDS = 0.2\n"
    code += "from maxpipe.cli import main; sys.exit(main())"
    arguments = ["large.txt", "--vocab-size", "60000", "--out", "out"]
    command = [sys.executable, "-c", code, "tokenizer", "train", *arguments]
    with subprocess.Popen(command, cwd=corpus, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert line.endswith(" s\n") and process.returncode == 130 and "Traceback" not in err
    assert {each.name for each in corpus.iterdir()} == {"text", "lines", "large.txt"}


def test_train_reports_progress(corpus: Path) -> None:
    sources = train_tokenizer.open_training_files([str(corpus / "lines")], "body")
    seen: list[tuple[str, int, int]] = []
    train_tokenizer.train(sources, "bpe", 300, lambda *said: seen.append(said))
    assert seen[0] == ("reading documents", 1, 1)
    assert ("computing the vocabulary", 0, 0) in seen


def test_tokenizer_show_command(capsys: Capture) -> None:
    assert (
        main(["tokenizer", "show", str(GOLDEN / "folder"), "--text", "Hello <|end_of_text|>"]) == 0
    )
    out = capsys.readouterr().out
    for line in (
        "kind                    huggingface\n",
        "begin                   0 <|begin_of_text|>\n",
        "ends of generated text  1 <|end_of_text|>, 3 <|stop|>\n",
        f"chat template           {GOLDEN / 'folder/chat_template.jinja'}\n",
        "comes back              yes\n",
    ):
        assert line in out
    assert main(["tokenizer", "show", str(GOLDEN / "bpe.model"), "--text", "a  b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["ids"], found["back"]) == ("sentencepiece", 421, "a b")
    assert found["comes_back"] is False
    assert main(["tokenizer", "show", str(GOLDEN / "nothing")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["tokenizer", "show", str(GOLDEN / "ranks.tiktoken")]) == 2
    assert "tokenizer.preset" in capsys.readouterr().err


def test_train_accepts_config_and_data_keys(corpus: Path, capsys: Capture) -> None:
    common = ["--vocab-size", "389", "--out"]
    lines = corpus / "lines/a.jsonl"
    assert train(str(lines), "--field", "body", *common, str(corpus / "a")) == 0
    keys = ["data.source=jsonl", f"data.path={lines}", "data.text_field=body", f"run.dir={corpus}"]
    assert train(*keys, *common, str(corpus / "b")) == 0
    config = corpus / "mine.yml"
    source = f"{{source: jsonl, path: {lines}, text_field: body}}"
    config.write_text(f"data: {{mixture: {{one: {source}}}}}\nrun: {{dir: {corpus}}}\n")
    assert train(str(config), *common, str(corpus / "c")) == 0
    wanted = (corpus / "a/tokenizer.json").read_bytes()
    for name in ("b", "c"):
        assert (corpus / name / "tokenizer.json").read_bytes() == wanted
    capsys.readouterr()
    assert train(*keys, "data.chat=messages", *common, str(corpus / "d")) == 2
    assert "data.chat = messages\n  must be off" in without_codes(capsys.readouterr().err)
    assert train(*common, str(corpus / "d")) == 2
    assert "must include data files, a config or data.* keys." in capsys.readouterr().err
