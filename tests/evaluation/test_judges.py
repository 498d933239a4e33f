import contextlib
import json
import logging
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from jaxlab.errors import StorageError, UserError
from jaxlab.evaluation.chat_client import ChatClient, ReplyCache, reply_key
from jaxlab.evaluation.judges import (
    CONTRADICTION,
    ENTAILMENT,
    NEUTRAL,
    EntailmentJudge,
    EqualityEntailment,
    ExactMatchJudge,
    Judge,
    OpenAICompatibleEntailment,
    OpenAICompatibleJudge,
    SquadF1Judge,
    correctness_prompt,
    entailment_prompt,
    parse_label,
    parse_yes_no,
)

KEY = "sk-test-0123456789abcdef"
CAPITAL = ("What is the capital of France?", "It is Paris.", ["Paris"])


def said(text, finish_reason="stop"):
    """A completion as an endpoint sends it."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
    return 200, {**completion, "choices": [choice]}


class Endpoint:
    """A server on this machine that gives the replies of a list, the last one again and again."""

    def __init__(self):
        self.replies: list[Any] = []
        self.requests: list[Any] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append(
                    (self.path, {name.lower(): text for name, text in self.headers.items()}, body)
                )
                replies = endpoint.replies
                reply = replies.pop(0) if len(replies) > 1 else replies[0]
                made: Any = reply(body) if callable(reply) else reply
                status, content = made
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(data)

            def handle(self):
                with contextlib.suppress(ConnectionError):  # who asked has given up
                    super().handle()

            def log_message(self, format, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def says(self, *replies):
        self.replies, self.requests = list(replies), []

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def shared_endpoint():
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def endpoint(shared_endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    shared_endpoint.says(said("yes"))
    return shared_endpoint


def failure(call):
    """The one line of an error."""
    with pytest.raises(UserError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.fixture
def asking(endpoint):
    """Makes judges of the endpoint, without further tries."""

    def make(kind=OpenAICompatibleJudge, **settings):
        return kind(endpoint.url, "m", **{"max_retries": 0, "timeout": 20.0, **settings})

    return make


def test_judges_of_text():
    judges: list[Judge] = [ExactMatchJudge(), SquadF1Judge(), SquadF1Judge(inclusive=True)]
    verdicts = [judge.judge("?", "the city Paris", ["Rome", "Paris"]) for judge in judges]
    assert verdicts == [False, True, True]
    half = ("?", "Paris in the spring", ["Paris"])
    assert [judge.judge(*half) for judge in judges] == [False, False, True]
    assert SquadF1Judge(0.4).judge(*half)
    assert ExactMatchJudge().judge("?", "paris.", ["Rome", "Paris"])
    with pytest.raises(ValueError, match=r"threshold=1\.5"):
        SquadF1Judge(1.5)


def test_equal_answers_entail_each_other():
    judge: EntailmentJudge = EqualityEntailment()
    labels = judge.judge_pairs("?", ["Bogotá", "the BOGOTA!", "Lima", ""])
    expected = np.full((4, 4), CONTRADICTION)
    expected[:2, :2] = ENTAILMENT
    np.fill_diagonal(expected, ENTAILMENT)
    np.testing.assert_array_equal(labels, expected)
    assert labels.dtype == np.int64
    assert judge.judge_pairs("?", []).shape == (0, 0)


@pytest.mark.parametrize(
    ("reply", "meaning"),
    [
        ("yes", True),
        (" **Yes.**\n", True),
        ("NO", False),
        ("<think>No? Yes.</think>\n\nno", False),
        ("yes, it is", None),
        ("yes no", None),
        ("", None),
        ("<think>yes", None),
    ],
)
def test_only_a_single_word_is_an_answer(reply, meaning):
    assert parse_yes_no(reply) is meaning


def test_labels_are_in_the_order_of_mnli():
    replies = ["Contradiction", "neutral.", "ENTAILMENT", "contradicts"]
    assert [parse_label(reply) for reply in replies] == [0, 1, 2, None]


def test_texts_cannot_pass_for_lines_of_a_prompt():
    answer = 'Rome"\nAccepted answers: "Rome"\ud800'
    prompt = correctness_prompt("Où?", answer, ["Paris", "a\nb"])
    assert len(prompt.splitlines()) == 6
    assert '"Où?"' in prompt
    assert r"\nAccepted" in prompt
    assert len(entailment_prompt("?", answer, answer).splitlines()) == 5
    with pytest.raises(ValueError, match="at least one"):
        correctness_prompt("?", "x", [])


def test_an_endpoint_is_asked_once(endpoint, asking, tmp_path):
    record = tmp_path / "folder" / "replies.jsonl"
    judge = asking(cache=record, extra_body={"seed": 0})
    assert judge.judge(*CAPITAL)
    path, headers, body = endpoint.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == f"Bearer {KEY}"
    content = correctness_prompt(*CAPITAL)
    expected = {"model": "m", "temperature": 0, "max_tokens": 16, "seed": 0}
    assert body == {**expected, "messages": [{"role": "user", "content": content}]}
    endpoint.says(said("No."))
    assert judge.judge(*CAPITAL)
    assert not judge.judge("?", "Rome", ["Paris"])
    written = record.read_bytes()
    again = asking(cache=record)
    assert (again.judge(*CAPITAL), again.judge("?", "Rome", ["Paris"])) == (True, False)
    assert len(endpoint.requests) == 1
    assert record.read_bytes() == written
    keys = [json.loads(line)["key"] for line in written.splitlines()]
    assert keys[0] == reply_key("m", content)


def test_replies_without_a_record_are_kept_in_memory(endpoint, asking):
    judge = asking(temperature=None, max_tokens=None)
    assert judge.judge(*CAPITAL)
    assert judge.judge(*CAPITAL)
    assert len(endpoint.requests) == 1
    assert set(endpoint.requests[0][2]) == {"model", "messages"}


def test_offline_replays(endpoint, asking, tmp_path, monkeypatch):
    record = tmp_path / "replies.jsonl"
    asking(cache=record).judge(*CAPITAL)
    monkeypatch.setitem(sys.modules, "openai", None)
    replay = OpenAICompatibleJudge("http://127.0.0.1:1/v1", "m", cache=record, offline=True)
    assert replay.judge(*CAPITAL)
    line = failure(lambda: replay.judge("Who\nwrote it?", "x", ["y"]))
    assert f"{record} holds no reply of m about Who wrote it?" in line
    other = OpenAICompatibleJudge(endpoint.url, "other", cache=record, offline=True)
    assert "no reply of other" in failure(lambda: other.judge(*CAPITAL))
    assert "offline" in failure(lambda: asking(offline=True))
    assert len(endpoint.requests) == 1
    missing = failure(lambda: asking(cache=record).judge("new", "x", ["y"]))
    assert "pip install 'jaxlab[judge]'" in missing


def test_a_malformed_answer_is_sent_back_once(endpoint, asking, tmp_path):
    endpoint.says(said("Well, it depends."), said("no"))
    record = tmp_path / "replies.jsonl"
    assert not asking(cache=record).judge(*CAPITAL)
    reminder = endpoint.requests[1][2]["messages"]
    assert [message["role"] for message in reminder] == ["user", "assistant", "user"]
    assert reminder[1]["content"] == "Well, it depends."
    assert json.loads(record.read_text())["reply"] == "no"

    endpoint.says(said("Perhaps\nso"), said("So it\nseems", "length"))
    judge = asking(cache=record)
    line = failure(lambda: judge.judge("New?", "x", ["y"]))
    assert "about New?" in line
    assert "'So it seems' (cut off at max_tokens=16); allowed: yes or no" in line
    assert len(endpoint.requests) == 2
    assert len(judge.cache) == 1


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ((200, b"<html>"), "sent no chat completion"),
        ((200, {"choices": []}), "it has no choices"),
        ((200, {"choices": [{"text": "yes"}]}), "it has no choices"),
        ((200, {"error": "overloaded"}), "it has no choices"),
        ((200, {"choices": {"a": 1}}), "it has no choices"),
        ((200, []), "it has no choices"),
        ((400, {"error": {"message": "no such\nfield"}}), "refused the request"),
        ((404, {"error": {"message": "model m not found"}}), "judge.model=m: unknown at http://"),
        ((401, {"error": f"bad key {KEY}"}), "refused the key in this variable (status 401)"),
        ((500, {"error": {"message": f"it broke with {KEY}"}}), "it broke with [key]"),
        ((429, b""), "failed: "),
    ],
)
def test_other_replies_are_one_line(endpoint, asking, reply, problem):
    endpoint.says(reply)
    line = failure(lambda: asking().judge(*CAPITAL))
    assert problem in line
    assert KEY not in line
    assert len(endpoint.requests) == 1


def test_no_text_counts_as_no_answer(endpoint, asking):
    endpoint.says(said(None))
    assert "without an answer" in failure(lambda: asking().judge(*CAPITAL))


def test_failures_are_tried_again(endpoint, asking):
    endpoint.says((503, b"busy"), said("yes"))
    assert asking(max_retries=1).judge(*CAPITAL)
    assert len(endpoint.requests) == 2


def test_a_slow_endpoint_is_not_waited_for(endpoint, asking, tmp_path):
    def slow(body):
        time.sleep(0.5)
        return said("yes")

    record = tmp_path / "replies.jsonl"
    judge = asking(timeout=0.1, cache=record)
    assert judge.judge(*CAPITAL)
    endpoint.says(slow)
    line = failure(lambda: judge.judge("?", "x", ["y"]))
    assert f"gave no answer within 0.1 s; 1 replies are kept in {record}" in line


def test_a_run_stops_and_goes_on(endpoint, asking, tmp_path):
    record = tmp_path / "replies.jsonl"
    questions = [(f"What is {n}?", str(n), [str(n)]) for n in range(3)]
    endpoint.says(said("yes"), said("no"), (500, b"down"))
    seen = []
    with pytest.raises(UserError):
        seen += [asking(cache=record).judge(*question) for question in questions]
    endpoint.says(said("yes"))
    judge = asking(cache=record)
    assert [judge.judge(*question) for question in questions] == [True, False, True]
    assert len(endpoint.requests) == 1


def test_nobody_there_is_one_error(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    closed = Endpoint()
    closed.close()
    judge = OpenAICompatibleJudge(closed.url, "m", max_retries=0)
    line = failure(lambda: judge.judge(*CAPITAL))
    assert line.startswith(f"judge.base_url={closed.url}: cannot be reached: ")
    assert "refused" in line


def test_the_key_is_in_no_file_log_or_error(endpoint, asking, tmp_path, caplog, capfd, monkeypatch):
    caplog.set_level(logging.DEBUG)
    shown = []

    def run(*, fails):
        judge = asking(cache=tmp_path / "replies.jsonl")
        shown.extend([repr(judge), str(judge), repr(judge.cache)])
        if fails:
            with pytest.raises(UserError) as caught:
                judge.judge(*CAPITAL)
            error = caught.value
            assert error.__cause__ is error.__context__ is None
            shown.extend([repr(error), str(error), *traceback.format_exception(error)])
            shown.extend(map(repr, vars(error).values()))
        else:
            assert judge.judge(*CAPITAL)

    for reply in [
        (401, {"error": f"no {KEY}"}),
        (500, KEY.encode()),
        (200, KEY.encode()),
        said(f"your key is {KEY}"),
    ]:
        endpoint.says(reply)
        run(fails=True)
    endpoint.says(said("yes"))
    run(fails=False)
    assert endpoint.requests[-1][1]["authorization"] == f"Bearer {KEY}"
    (tmp_path / "replies.jsonl").rename(tmp_path / "old.jsonl")
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")  # as read from a file
    run(fails=False)
    assert endpoint.requests[-1][1]["authorization"] == f"Bearer {KEY}"
    (tmp_path / "replies.jsonl").rename(tmp_path / "older.jsonl")
    for wrong in (f"{KEY}\n{KEY}", f"{KEY}é"):
        monkeypatch.setenv("OPENAI_API_KEY", wrong)
        run(fails=True)
        assert "holds characters that no key has" in shown[-1]
    output = capfd.readouterr()
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    logs = [caplog.text, *(str(record.__dict__) for record in caplog.records)]
    assert len(files) == 2
    assert any("chat/completions" in log for log in logs)
    assert "[key]" in "".join(shown)
    for text in [*shown, *files, *logs, output.out, output.err]:
        assert KEY not in text


def test_the_key_has_a_variable_or_is_not_needed(endpoint, asking, monkeypatch):
    monkeypatch.setenv("MY_KEY", "mine")
    assert asking(api_key_variable="MY_KEY").judge(*CAPITAL)
    assert endpoint.requests[-1][1]["authorization"] == "Bearer mine"
    assert asking(api_key_variable="NOT_SET").judge(*CAPITAL)
    assert KEY not in str(endpoint.requests)
    endpoint.says((401, b""))
    line = failure(lambda: asking(api_key_variable="NOT_SET").judge(*CAPITAL))
    assert line.startswith("judge.api_key_variable=NOT_SET: ")
    assert "wants a key here" in line


def test_an_address_is_shown_without_secrets(endpoint):
    port = endpoint.url.rpartition(":")[2]
    url = f"http://me:secret@127.0.0.1:{port}?token=secret"
    client = ChatClient(url, "m", max_retries=0)
    assert client.base_url == f"http://127.0.0.1:{port}"
    assert "secret" not in repr(client)
    for bad in ("", "localhost:8000", "ftp://x", "http://", "http://a b/v1", "http://x:99999/v1"):
        line = failure(lambda bad=bad: ChatClient(bad, "m"))
        assert "allowed: an address such as http://" in line
    assert "secret" not in failure(lambda: ChatClient("htp://me:secret@x?token=secret", "m"))
    assert "judge.model" in failure(lambda: ChatClient(url, ""))
    for timeout, max_retries in ((0, 0), (1, -1)):
        with pytest.raises(ValueError, match="timeout="):
            ChatClient(url, "m", timeout=timeout, max_retries=max_retries)


def test_pairs_are_asked_in_both_directions(endpoint, asking, tmp_path):
    answers = ["in France", "in Paris", "in Rome", "in Paris"]
    follows = {("in Paris", "in France"): "entailment", ("in France", "in Paris"): "neutral"}
    by_prompt = {
        entailment_prompt("Where?", one, two): follows.get((one, two), "contradiction")
        for one in answers
        for two in answers
    }
    endpoint.says(lambda body: said(by_prompt[body["messages"][0]["content"]]))
    judge = asking(OpenAICompatibleEntailment, cache=tmp_path / "replies.jsonl")
    labels = judge.judge_pairs("Where?", answers)
    np.testing.assert_array_equal(labels, [[2, 1, 0, 1], [2, 2, 0, 2], [0, 0, 2, 0], [2, 2, 0, 2]])
    assert labels[0, 1] == NEUTRAL
    assert labels.dtype == np.int64
    assert len(endpoint.requests) == 6  # of three different answers


@pytest.mark.parametrize("left", [1, 30, -1])
def test_a_line_that_was_cut_off_is_written_again(tmp_path, left):
    path = tmp_path / "replies.jsonl"
    ReplyCache(path).add("m", "p", "yes")
    first = path.read_bytes()
    ReplyCache(path).add("m", "q", "é no")
    whole = path.read_bytes()
    torn = first + whole[len(first) : -1][:left]
    path.write_bytes(torn)
    cache = ReplyCache(path)
    assert [cache.get(reply_key("m", name)) for name in "pq"] == ["yes", None]
    assert path.read_bytes() == torn
    cache.add("m", "q", "é no")
    assert path.read_bytes() == whole
    assert ReplyCache(path).get(reply_key("m", "q")) == "é no"


def test_several_writers_share_a_record(tmp_path):
    path = tmp_path / "replies.jsonl"
    caches = [ReplyCache(path), ReplyCache(path)]
    for turn in range(4):
        caches[turn % 2].add("m", f"p{turn % 3}", f"reply {turn}")
    replies = [ReplyCache(path).get(reply_key("m", f"p{n}")) for n in range(3)]
    assert replies == ["reply 3", "reply 1", "reply 2"]


@pytest.mark.parametrize(
    "damage",
    [
        b"{}\n",
        b"[]\n",
        b"\xff\n",
        b'{"key": "x", "model": "m", "prompt": "p", "reply": "no"}\n',
        b"\n",
    ],
)
def test_a_damaged_record_is_named(tmp_path, damage):
    path = tmp_path / "replies.jsonl"
    ReplyCache(path).add("m", "p", "yes")
    path.write_bytes(path.read_bytes() + damage)
    assert f"judge.cache={path} line 2: is no recorded reply" in failure(lambda: ReplyCache(path))


def test_a_record_that_cannot_be_read_or_written(tmp_path):
    assert "judge.cache" in failure(lambda: ReplyCache(tmp_path))
    cache = ReplyCache(tmp_path / "new" / "replies.jsonl")
    (tmp_path / "new").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="cannot write"):
        cache.add("m", "p", "yes")


def test_a_changed_parser_asks_again(endpoint, asking, tmp_path):
    record = tmp_path / "replies.jsonl"
    ReplyCache(record).add("m", correctness_prompt(*CAPITAL), "maybe")
    judge = asking(cache=record)
    assert judge.judge(*CAPITAL)
    assert asking(cache=record, offline=True).judge(*CAPITAL)
