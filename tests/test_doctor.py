"""`agentkv.doctor` against a stand-in with one thing amiss at a time; tests/server has the real server."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from agentkv.doctor import CHECKS, Examination, Lengths, ServerOptions, Status, examine
from agentkv.doctor.blocks import expected, smallest_block
from agentkv.doctor.template import dates_in
from agentkv.template import measure
from tests.stub_connector import StubConnectorServer
from tests.stub_server import MODEL, Quirk, StubServer
from tests.templates import load


def examined(server: StubServer, family: str = "qwen", **more: Any) -> Examination:
    """Examine a stand-in with the tokenizer of a family."""
    options = ServerOptions(server.url, attempts=1, **more.pop("settings", {}))
    return examine(options, tokenizer=more.pop("tokenizer", load(family)), **more)


def not_ok(found: Examination) -> dict[str, Status]:
    """Return the checks that are not ok."""
    return {f.name: f.status for f in found.findings if f.status is not Status.OK}


def test_a_good_server_passes_every_check() -> None:
    """Nothing is amiss, and every check has a finding in the order of the list."""
    with StubServer() as server:
        found = examined(server)
    assert not_ok(found) == {}
    assert [finding.name for finding in found.findings] == [check.name for check in CHECKS]
    assert (found.ok, found.model, found.url) == (True, MODEL, server.url)
    assert found["model"].found == "stub, 8,192 tokens of prompt and answer together"
    assert found["version"].found == "vLLM 0.32.0"


def test_needed_checks_are_those_without_which_nothing_is_saved() -> None:
    """The set is pinned: a failure of one of them is a failure of the examination."""
    assert {check.name for check in CHECKS if check.needed} == {
        "reachable",
        "API key",
        "model",
        "tokenizer",
        "token-id prompts",
        "token details",
        "prefix caching",
        "salts",
    }


def test_every_dependency_is_an_earlier_check() -> None:
    """A check waits only for checks that were made before it."""
    for number, check in enumerate(CHECKS):
        assert set(check.after) <= {earlier.name for earlier in CHECKS[:number]}


def test_an_address_where_nothing_answers_fails() -> None:
    """The first check says so; all others are not checked, and none is asked."""
    with StubServer() as server:
        url = server.url
    found = examine(ServerOptions(url, attempts=1), tokenizer=load("qwen"))
    assert found["reachable"].status is Status.FAILED
    assert "cannot be reached" in found["reachable"].found
    assert {finding.status for finding in found.findings[1:]} == {Status.UNCHECKED}
    assert (found.ok, found.model) == (False, None)


@pytest.mark.parametrize(("given", "words"), [(None, "is asked for"), ("wrong-key", "is refused")])
def test_a_missing_or_wrong_key_is_named(given: str | None, words: str) -> None:
    """401 is told apart from other failures, and the key stands nowhere although the server repeats it."""
    with StubServer(api_key="right-key") as server:
        found = examined(server, settings={"api_key": given})
    assert found["API key"].status is Status.FAILED
    assert words in found["API key"].found
    assert "401" in found["API key"].found
    assert "--api-key-env" in found["API key"].fix
    assert found["model"].found == "needs 'API key' first"
    assert "wrong-key" not in str(found)


def test_the_right_key_is_accepted() -> None:
    """With it, everything else is measured."""
    with StubServer(api_key="right-key") as server:
        found = examined(server, settings={"api_key": "right-key"})
    assert found["API key"].found == "accepted"
    assert found.ok


def test_a_model_that_is_not_served_fails() -> None:
    """The served names are told."""
    with StubServer() as server:
        found = examined(server, model="other")
    assert found["model"].status is Status.FAILED
    assert "serves no model 'other'; it serves: stub" in found["model"].found
    assert found["salts"].status is Status.UNCHECKED


def test_prefix_caching_that_is_off_fails_with_the_flag() -> None:
    """What depends on it is not checked; what does not is."""
    with StubServer({Quirk.NO_CACHE}) as server:
        found = examined(server)
    assert not found.ok
    assert found["prefix caching"].status is Status.FAILED
    assert "--enable-prefix-caching" in found["prefix caching"].fix
    assert {found[name].status for name in ("salts", "block size", "replicas")} == {Status.UNCHECKED}
    assert found["scale-out"].status is Status.OK


def test_prefix_caching_is_measured_where_metrics_are_missing() -> None:
    """Without /metrics a longer prompt is tried, and nothing cached of that either is a failure."""
    with StubServer({Quirk.NO_CACHE, Quirk.NO_METRICS}) as server:
        found = examined(server)
    assert found["prefix caching"].status is Status.FAILED
    assert "of 641 tokens" in found["prefix caching"].found
    assert "--measure-large" in found["prefix caching"].fix


def test_missing_token_details_fail_with_the_flag() -> None:
    """Whether anything is cached then cannot be said, and is not."""
    with StubServer({Quirk.NO_DETAILS}) as server:
        found = examined(server)
    assert found["token details"].status is Status.FAILED
    assert "--enable-prompt-tokens-details" in found["token details"].fix
    assert found["prefix caching"].status is Status.UNCHECKED
    assert not found.ok


def test_salts_that_are_ignored_fail() -> None:
    """What is cached under one salt is found under another."""
    with StubServer({Quirk.SALTS_IGNORED}) as server:
        found = examined(server)
    assert found["salts"].status is Status.FAILED
    assert "96 tokens that were cached under one salt were found under another salt" in found["salts"].found
    assert "cache_salt had no effect" in found["parameters"].found
    assert not found.ok


def test_a_gateway_that_drops_parameters_is_noticed() -> None:
    """Neither generated ids nor salts come through it, and both are said."""
    with StubServer({Quirk.PARAMETERS_DROPPED}) as server:
        found = examined(server)
    assert found["parameters"].status is Status.WARNING
    assert found["parameters"].found.startswith("return_token_ids and cache_salt had no effect")
    assert found["generated ids"].status is Status.WARNING
    assert found["salts"].status is Status.FAILED


@pytest.mark.parametrize(("quirks", "words"), [((), "ignored"), ((Quirk.PARAMETERS_REFUSED,), "refused")])
def test_what_becomes_of_unknown_parameters_is_told(quirks: tuple[Quirk, ...], words: str) -> None:
    """Known ones arrive all the same."""
    with StubServer(quirks) as server:
        found = examined(server)
    assert found["parameters"].status is Status.OK
    assert found["parameters"].found.endswith(f"unknown ones are {words}")


def test_missing_metrics_are_a_warning() -> None:
    """The block size is measured, and is to be given to the backend."""
    with StubServer({Quirk.NO_METRICS}) as server:
        found = examined(server)
    assert found["metrics"].status is Status.WARNING
    assert "give block_size=16 to VLLMBackend" in found["block size"].found
    assert {found[name].status for name in ("restarts", "connector")} == {Status.UNCHECKED}
    assert found.ok


@pytest.mark.parametrize("block", [1, 8, 16, 32, 48, 96, 128, 528])
def test_the_block_size_is_measured(block: int) -> None:
    """It is found from cached counts alone, and agrees with what /metrics says."""
    with StubServer(block_size=block) as server:
        found = examined(server)
    assert found["block size"].status is Status.OK
    assert found["block size"].found.startswith(f"{block} tokens, as /metrics says")


def test_a_wrong_block_size_in_metrics_is_noticed() -> None:
    """What was measured wins."""
    with StubServer(block_size=16, told_block_size=32) as server:
        found = examined(server)
    assert found["block size"].status is Status.WARNING
    assert found["block size"].found.startswith("16 tokens")
    assert found["block size"].found.endswith("but /metrics says 32")
    assert found["block size"].fix == "give block_size=16 to VLLMBackend"


def test_large_blocks_are_measured_when_asked_for() -> None:
    """By default they are not looked for, and the finding says how to."""
    with StubServer(block_size=1056) as server:
        short = examined(server)
        long = examined(server, lengths=Lengths.LONG)
    assert short["prefix caching"].status is Status.UNCHECKED
    assert "--measure-large" in short["prefix caching"].fix
    assert long["prefix caching"].status is Status.OK
    assert long["block size"].found.startswith("1,056 tokens, as /metrics says")


def test_no_prompt_exceeds_the_context() -> None:
    """A server with a short context is asked for no more than it takes."""
    with StubServer({Quirk.NO_CACHE, Quirk.NO_METRICS}, context_window=256) as server:
        found = examined(server, lengths=Lengths.LONG)
        longest = max(len(request.body["prompt"]) for request in server.got("/v1/completions"))
    assert longest == 193
    assert found["prefix caching"].status is Status.FAILED


def test_requests_that_rotate_over_caches_are_noticed() -> None:
    """Repetitions that find nothing are counted, and the block size is measured all the same."""
    with StubServer(replicas=2) as server:
        found = examined(server)
    assert found["replicas"].status is Status.WARNING
    assert "rotate over replicas" in found["replicas"].found
    assert "X-Session-ID" in found["replicas"].fix
    assert found["block size"].found.startswith("16 tokens")
    assert found.ok


def test_a_router_that_heeds_the_routing_header_passes() -> None:
    """The header that the backend sends keeps the probes on one of two caches."""
    with StubServer({Quirk.STICKY}, replicas=2) as server:
        found = examined(server)
    assert found["replicas"].status is Status.OK


def test_another_tokenizer_fails() -> None:
    """The ids of a text differ, and the fix names the option."""
    with StubServer(family="gemma") as server:
        found = examined(server, "qwen")
    assert found["tokenizer"].status is Status.FAILED
    assert "they part at index" in found["tokenizer"].found
    assert "--tokenizer" in found["tokenizer"].fix
    assert not found.ok


def test_a_tokenizer_that_cannot_be_found_fails() -> None:
    """A server that does not say what it loaded needs one named; its cache is measured without."""
    with StubServer() as server:
        found = examine(ServerOptions(server.url, attempts=1))
    assert found["tokenizer"].status is Status.FAILED
    assert "does not say which model it loaded" in found["tokenizer"].found
    assert found["rendering"].status is Status.UNCHECKED
    assert found["block size"].status is Status.OK
    assert found["append-only"].status is Status.OK


def test_without_tokenize_the_ids_are_not_checked() -> None:
    """No failure is made up, and the server's render endpoint still shows the template."""
    with StubServer({Quirk.NO_TOKENIZE}) as server:
        found = examined(server)
    assert found["tokenizer"].status is Status.UNCHECKED
    assert found["append-only"].status is Status.OK
    assert found["block size"].status is Status.OK
    assert found.ok


def test_without_any_rendering_the_template_is_not_checked() -> None:
    """Each of its checks says why."""
    with StubServer({Quirk.NO_TOKENIZE, Quirk.NO_SCALE_OUT}) as server:
        found = examined(server)
    names = ("append-only", "late system messages", "tool messages", "alternation", "reasoning", "date")
    assert {found[name].status for name in names} == {Status.UNCHECKED}
    assert {found[name].found for name in names} == {
        "the server renders no messages (neither a render endpoint nor /tokenize)"
    }


def test_another_served_template_is_noticed() -> None:
    """The same vocabulary under another template: texts agree, messages do not."""
    with StubServer(family="qwen") as server:
        found = examined(server, "strict")
    assert found["tokenizer"].status is Status.OK
    assert found["rendering"].status is Status.WARNING
    assert "chat_template=" in found["rendering"].fix


def test_prompts_of_ids_that_are_refused_fail() -> None:
    """The server's words are in the finding, and the cache is measured with chat messages."""
    with StubServer({Quirk.NO_IDS}) as server:
        found = examined(server)
    assert found["token-id prompts"].status is Status.FAILED
    assert "Input should be a valid string" in found["token-id prompts"].found
    assert found["prefix caching"].status is Status.OK
    assert found["salts"].status is Status.OK
    assert found["block size"].status is Status.UNCHECKED


@pytest.mark.parametrize(
    ("quirk", "name", "flag"),
    [
        (Quirk.NO_SCALE_OUT, "scale-out", "--enable-scale-out"),
        (Quirk.NO_TOOL_PARSER, "tool parser", "--tool-call-parser"),
        (Quirk.NO_PRIORITY, "priority", "--scheduling-policy priority"),
        (Quirk.NO_GRAMMAR, "structured output", "structured_outputs"),
        (Quirk.NONE_HIDES_TOOLS, "tool_choice none", "--exclude-tools-when-tool-choice-none"),
    ],
)
def test_what_agentkv_can_do_without_is_a_warning(quirk: Quirk, name: str, flag: str) -> None:
    """The fix names the flag, and the examination passes."""
    with StubServer({quirk}) as server:
        found = examined(server)
    assert found[name].status is Status.WARNING
    assert flag in found[name].fix
    assert found.ok


def test_tools_that_tool_choice_hides_are_noticed_by_their_number_alone() -> None:
    """Without a render endpoint the sizes of chat prompts are compared."""
    with StubServer({Quirk.NONE_HIDES_TOOLS, Quirk.NO_SCALE_OUT}) as server:
        found = examined(server)
    assert found["tool_choice none"].status is Status.WARNING


@pytest.mark.parametrize("family", ["chatml", "llama", "gemma", "mistral", "strict", "phi"])
def test_the_served_template_is_measured_as_here(family: str) -> None:
    """What the server renders shows the traits that the same template shows in this process."""
    with StubServer(family=family) as server:
        found = examined(server, family)
    assert found["rendering"].status is Status.OK
    assert_traits(found, family)


@pytest.mark.parametrize("family", ["chatml", "llama", "qwen", "strict"])
def test_the_served_template_is_measured_without_a_tokenizer_here(family: str) -> None:
    """The server decodes what it rendered, and the traits are the same."""
    with StubServer(family=family) as server:
        found = examined(server, tokenizer=None)
        assert server.got("/detokenize")
    assert found["tokenizer"].status is Status.FAILED
    assert_traits(found, family)


def assert_traits(found: Examination, family: str) -> None:
    """Compare what was found with what the family's template shows in this process."""
    here = measure(load(family))
    assert found["append-only"].status is (
        Status.OK if here.append_only and not here.tools_moved else Status.WARNING
    )
    assert found["late system messages"].found.startswith(here.late_system.value)
    assert found["tool messages"].found.startswith(here.tool_role.value)
    assert found["alternation"].found.startswith("demanded" if here.alternation else "not demanded")


def test_reasoning_that_the_served_template_strips_is_told() -> None:
    """The Qwen-like template keeps it within a tool round only."""
    with StubServer(family="qwen") as server:
        found = examined(server)
    assert found["reasoning"].found.startswith("removed once a new user message follows")


def test_a_date_that_the_server_writes_is_a_warning() -> None:
    """K25: it is not in the client's template, so only the server's environment can pin it."""
    today = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d")
    with StubServer(date=f"Current date: {today}\n") as server:
        found = examined(server)
    assert found["date"].status is Status.WARNING
    assert "VLLM_SYSTEM_START_DATE=" in found["date"].fix


def test_a_date_that_the_template_writes_is_pinned_by_agentkv() -> None:
    """The client's template writes the same one."""
    with StubServer(family="harmony") as server:
        found = examined(server, "harmony")
    assert found["date"].status is Status.OK
    assert "written by the template" in found["date"].found


def test_a_pinned_date_is_no_date() -> None:
    """A date that is not today's does not change at midnight."""
    with StubServer(date="Current date: 2020-02-02\n") as server:
        found = examined(server)
    assert found["date"].found == "none is written"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Today is 2026-03-05.", "2026-03-05"),
        ("Today Date: 05 Mar 2026", "05 Mar 2026"),
        ("It is March 5, 2026", "March 5, 2026"),
        ("the day before: 4 March 2026", "4 March 2026"),
        ("another time zone: 2026-03-06", "2026-03-06"),
        ("Knowledge cutoff: 2024-06", None),
        ("2025-03-05", None),
    ],
)
def test_dates_are_found_in_any_usual_form(text: str, shown: str | None) -> None:
    """A day on either side counts, as the server may stand in another time zone."""
    assert dates_in(text, dt.date(2026, 3, 5)) == shown


def test_an_answer_of_no_known_form_leaves_other_checks_alone() -> None:
    """What cannot be read is said in the finding of the check that read it."""
    with StubServer({Quirk.ODD_USAGE}) as server:
        found = examined(server)
    assert found["token-id prompts"].status is Status.FAILED
    assert "of no known form" in found["token-id prompts"].found
    assert found["scale-out"].status is Status.OK


def test_every_prompt_of_ids_is_salted_but_one() -> None:
    """Users' cached prompts are left alone: one unsalted prompt of random ids is sent, and none twice."""
    with StubServer() as server:
        examined(server)
        posts = server.got("/v1/completions") + server.got("/v1/chat/completions")
        salts = [request.body.get("cache_salt") for request in posts]
    assert salts.count(None) == 1
    assert all(len(salt) == 64 for salt in salts if salt is not None)


@pytest.mark.parametrize("block", [1, 16, 32, 100])
def test_the_smallest_block_explains_its_own_counts(block: int) -> None:
    """Counts of prefixes that lose one block each determine the size."""
    lengths = [601, 600 // block * block, 600 // block * block - block]
    seen = [(length, expected(length, block)) for length in lengths]
    assert smallest_block(seen) == block


@pytest.mark.parametrize("seen", [[], [(97, 0)], [(97, 96), (96, 80), (90, 64)], [(97, 97)]])
def test_counts_that_no_block_explains_give_none(seen: list[tuple[int, int]]) -> None:
    """Nothing is guessed where nothing fits."""
    assert smallest_block(seen) is None


def test_one_observation_alone_gives_the_smallest_size() -> None:
    """96 of 97 tokens fit any divisor of 96."""
    assert smallest_block([(97, 96)]) == 1
    assert smallest_block([(97, 96), (96, 64)]) == 32


def test_progress_is_told_before_each_check() -> None:
    """Every check is announced, in order."""
    told: list[str] = []
    with StubServer() as server:
        examined(server, progress=told.append)
    assert told == [check.name for check in CHECKS]


def test_the_connector_is_told_with_what_it_does() -> None:
    """Its model and number format, and whether it compiles."""
    with StubConnectorServer() as server:
        found = examined(server)
    assert found["connector"].found == "splices for LlamaForCausalLM in float32, compiles"
    assert found["exact answers"].status is Status.OK
    assert "same before and after a splice" in found["exact answers"].found


def test_a_server_without_a_connector_is_well() -> None:
    """Nothing splices, so nothing can be spoilt."""
    with StubServer() as server:
        found = examined(server)
    assert found["connector"].found.startswith("absent")
    assert found["exact answers"].found == "nothing splices here"


def test_an_examined_connector_keeps_one_artifact_whatever_often_it_is_asked() -> None:
    """The made-up chunk is the same each time."""
    with StubConnectorServer() as server:
        examined(server)
        examined(server)
    assert len(server.artifacts) == 1


def test_a_server_that_compiles_for_nobody_is_not_tried() -> None:
    """It says what to do."""
    with StubConnectorServer(compiles=False) as server:
        found = examined(server)
    assert found["exact answers"].status is Status.UNCHECKED


def test_spliced_tokens_that_are_found_without_a_salt_are_a_failure() -> None:
    """A partner that ignores salts would hand them to exact requests."""
    with StubConnectorServer({Quirk.SALTS_IGNORED}) as server:
        found = examined(server)
    assert found["exact answers"].status is Status.FAILED
    assert "without its salt" in found["exact answers"].found
