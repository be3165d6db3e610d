from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fednl.errors import DataError, FednlError, SettingsError
from fednl.federation.inline import InlinePool
from fednl.federation.jobs import answer_of, do
from fednl.federation.pool import Job, Result


def pool(error: BaseException | None = None, says: Callable[[Any], None] = lambda tell: None) -> InlinePool:
    def handler(job: dict[str, Any], blobs: list[bytes], tell: Any) -> tuple[dict[str, Any], list[bytes]]:
        tell({"note": "working"})
        if error is not None:
            raise error
        return {"double": 2 * job["n"]}, [b"blob"]

    return InlinePool({"double": handler})


def test_a_job_gives_its_answer_its_blobs_and_what_it_said_meanwhile() -> None:
    told: list[Any] = []
    result = do(pool(), Job("double", {"n": 4}), lambda job, facts: told.append((job.op, facts)))
    assert answer_of(result) == {"double": 8} and result.blobs == [b"blob"]
    assert told == [("double", {"note": "working"})]


@pytest.mark.parametrize("kind", [DataError, SettingsError, FednlError])
def test_an_error_of_this_library_comes_back_as_it_was(kind: type[FednlError]) -> None:
    with pytest.raises(FednlError, match=r"^mend it\.$") as caught:
        do(pool(kind("mend it.")), Job("double", {"n": 4}))
    assert type(caught.value) is kind and caught.value.exit_code == kind.exit_code


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ZeroDivisionError("private words"), r"ZeroDivisionError at test_jobs\.py:\d+ .*fault of fednl"),
        (MemoryError("private words"), r"Memory ran out at 'double' .*lower training\.batch"),
        (OSError(28, "private words"), r"OSError at "),
    ],
)
def test_other_errors_keep_their_words_to_themselves(error: Exception, words: str) -> None:
    with pytest.raises(FednlError, match=words) as caught:
        do(pool(error), Job("double", {"n": 4}))
    assert type(caught.value) is FednlError and "private" not in str(caught.value)


def test_a_lost_worker_is_told() -> None:
    with pytest.raises(FednlError, match="'score'; free memory and resume"):
        answer_of(Result(Job("score"), {"status": "lost", "answer": {}}, []))
