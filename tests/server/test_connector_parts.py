"""The connector's parts that need no server: choosing, quotas, holding, options and start-up checks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentkv.errors import CapabilityError, ConfigurationError
from agentkv.kv.protocol import SpliceSpec

ONE, OTHER = "1" * 64, "2" * 64
KEY = "a key of the tests"


def spec(artifact: str, start: int, stop: int, offset: int = 0) -> SpliceSpec:
    return SpliceSpec(artifact=artifact, start=start, stop=stop, offset=offset)


@pytest.mark.parametrize(
    ("computed", "limit", "expected"),
    [
        (32, 500, [(ONE, 32, 100, 16), (OTHER, 100, 160, 0)]),
        (64, 500, [(ONE, 64, 100, 48), (OTHER, 100, 160, 0)]),
        (128, 500, [(OTHER, 128, 160, 28)]),
        (32, 150, [(ONE, 32, 100, 16), (OTHER, 100, 150, 0)]),
        (0, 500, []),
        (160, 500, []),
        (100, 100, []),
    ],
)
def test_a_run_begins_at_the_cached_tokens_and_has_no_gap(
    computed: int, limit: int, expected: list[tuple[str, int, int, int]]
) -> None:
    """What is loaded follows the local hit, goes on over touching spans, and leaves a token to compute."""
    from vllm_agentkv.choosing import run_from

    splices = [spec(ONE, 32, 100, 16), spec(OTHER, 100, 160), spec(ONE, 200, 260)]
    run = run_from(splices, computed, limit)
    assert [(piece.artifact, piece.start, piece.stop, piece.offset) for piece in run] == expected


def test_slots_follow_the_block_table() -> None:
    """A token's slot is its block's number times the block size, and its place in it."""
    from vllm_agentkv.choosing import slots_of

    assert slots_of([7, 3], 3, 6, 4) == [7 * 4 + 3, 3 * 4, 3 * 4 + 1]


class TestHolding:
    """What a worker holds of artifacts, over a real store."""

    @pytest.fixture
    def made(self, tmp_path: Path) -> Any:
        """A store with two artifacts of a tiny model of four KV heads."""
        import torch

        from agentkv.kv import ArtifactHeader, ArtifactStore, KVSpan, LayerKV, ModelIdentity, RopeSpec

        rope = RopeSpec.of(
            {
                "model_type": "llama",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "hidden_size": 32,
                "head_dim": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                "max_position_embeddings": 512,
            }
        )
        identity = ModelIdentity(
            architecture="LlamaForCausalLM",
            weights="0" * 64,
            tokenizer="0" * 64,
            layers=2,
            kv_heads=4,
            key_dim=8,
            value_dim=8,
            dtype="float32",
            rope=rope.model_dump(mode="json"),
        )
        store = ArtifactStore(tmp_path)
        spans = {}
        for first in (0, 100):
            ids = tuple(range(first, first + 10))
            layers = tuple(LayerKV(torch.randn(4, 10, 8), torch.randn(4, 10, 8)) for _ in range(2))
            span = KVSpan(layers, 3)
            header = ArtifactHeader.of(span, tenant="t", identity=identity, anchor=(1, 2, 3), ids=ids)
            spans[store.save(header, span)] = (ids, span)
        return SimpleNamespace(store=store, identity=identity, rope=rope, spans=spans)

    def source(self, made: Any, name: str) -> Any:
        from vllm_agentkv.work import FileStamp, Source

        stamp = FileStamp.of(made.store.path(name))
        assert stamp is not None
        return Source("t", made.spans[name][0], stamp)

    def test_each_rank_loads_its_own_heads(self, made: Any) -> None:
        """Under tensor parallelism the ranks' heads together are the artifact's, turned to their place."""
        import torch
        from vllm_agentkv.loading import Tiers
        from vllm_agentkv.work import Piece

        name, (_, whole) = next(iter(made.spans.items()))
        expected = whole.slice(2, 9).moved(50, made.rope)
        pieces, sources = [Piece(name, 50, 57, 2)], [self.source(made, name)]
        ranks = [
            Tiers(made.store, made.identity, rank=rank, of=2, most=1 << 20).placed(pieces, sources)[0]
            for rank in range(2)
        ]
        for layer, held in enumerate(expected.layers):
            keys = torch.cat([rank.layers[layer].keys for rank in ranks])
            values = torch.cat([rank.layers[layer].values for rank in ranks])
            assert torch.equal(keys, held.keys)
            assert torch.equal(values, held.values)

    def test_memory_is_bounded(self, made: Any) -> None:
        """The artifact that was used longest ago makes room."""
        from vllm_agentkv.loading import Tier, Tiers

        one, other = made.spans
        room = made.spans[one][1].nbytes
        tiers = Tiers(made.store, made.identity, rank=0, of=1, most=room)
        taken = [tiers.span(name, self.source(made, name))[1] for name in (one, one, other, one)]
        assert taken == [Tier.DISK, Tier.RAM, Tier.DISK, Tier.DISK]
        assert tiers.nbytes == room

    def test_pieces_of_two_artifacts_are_joined(self, made: Any) -> None:
        """Contiguous pieces are one span, each turned to its own place."""
        import torch
        from vllm_agentkv.loading import Tiers
        from vllm_agentkv.work import Piece

        one, other = made.spans
        tiers = Tiers(made.store, made.identity, rank=0, of=1, most=0)
        pieces = [Piece(one, 20, 26, 4), Piece(other, 26, 36, 0)]
        span, _ = tiers.placed(pieces, [self.source(made, one), self.source(made, other)])
        second = made.spans[other][1].moved(26, made.rope)
        assert (span.position, len(span)) == (20, 16)
        assert torch.equal(span.layers[1].keys[:, 6:], second.layers[1].keys)

    def test_a_tenants_bytes_are_counted_with_what_is_being_compiled(self, made: Any) -> None:
        """A quota holds for files and for reservations, and for one tenant alone."""
        from vllm_agentkv.quota import Quota

        taken = sum(made.store.nbytes(name) for name in made.spans)
        quota = Quota(made.store, taken + 100)
        assert quota.reserve("request 1", "t", 60) is None
        assert quota.reserve("request 2", "t", 60) == 20
        assert quota.reserve("request 2", "another tenant", 60) is None
        quota.release("request 1")
        assert quota.reserve("request 2", "t", 60) is None

    def test_a_deleted_artifact_no_longer_counts(self, made: Any) -> None:
        """Room that is freed by deleting can be used."""
        from vllm_agentkv.quota import Quota

        quota = Quota(made.store, 1)
        assert quota.used("t") > 1
        for name in made.spans:
            made.store.delete(name)
        assert quota.used("t") == 0


class TestOptions:
    """What `kv_connector_extra_config` may hold."""

    def test_an_unknown_option_is_named(self) -> None:
        """A misspelt option is no option that was left out."""
        from vllm_agentkv.options import read_options

        with pytest.raises(ConfigurationError, match="compyle"):
            read_options({"store": "/somewhere", "compyle": "on"})

    def test_a_key_in_the_configuration_is_refused(self) -> None:
        """vLLM logs its configuration, so a key has no place in it."""
        from vllm_agentkv.options import read_options

        with pytest.raises(ConfigurationError, match="signing_key"):
            read_options({"store": "/somewhere", "signing_key": KEY})

    def test_a_key_is_read_from_the_environment_or_a_file(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """White space around it does not count."""
        from vllm_agentkv.options import KeySource

        monkeypatch.setenv("SOME_KEY", KEY)
        path = tmp_path / "key"
        path.write_text(KEY + "\n", encoding="utf-8")
        assert KeySource(env="SOME_KEY").read() == KeySource(file=path).read() == KEY.encode()

    def test_a_short_key_is_refused_without_being_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The message says how long it is."""
        from vllm_agentkv.options import KeySource

        monkeypatch.setenv("SOME_KEY", "secret")
        with pytest.raises(ConfigurationError, match="6 bytes") as raised:
            KeySource(env="SOME_KEY").read()
        assert "secret" not in str(raised.value)


class TestChecks:
    """What the connector does not start with."""

    @staticmethod
    def config(**changes: Any) -> Any:
        """A server as it should be, but for the changes."""
        made: dict[str, Any] = {
            "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
            "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": True},
            "model_config": {"use_mla": False},
            "kv_transfer_config": {"kv_load_failure_policy": "fail"},
            "pass_config": {},
            "speculative_config": None,
        }
        for name, change in changes.items():
            made[name] = {**(made[name] or {}), **change}
        spaces = {name: None if one is None else SimpleNamespace(**one) for name, one in made.items()}
        spaces["compilation_config"] = SimpleNamespace(pass_config=spaces.pop("pass_config"))
        return SimpleNamespace(**spaces)

    @staticmethod
    def check(config: Any, *, version: str = "0.32.0", groups: int = 1, **options: Any) -> None:
        from vllm_agentkv.checks import check_server
        from vllm_agentkv.options import read_options

        caches: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec="spec")] * groups)
        check_server(config, caches, read_options({"store": "/somewhere", **options}), version, "float32")

    def test_a_plain_server_is_fine(self) -> None:
        """So the checks below fail for what they name."""
        self.check(self.config())
        self.check(self.config(cache_config={"cache_dtype": "float32"}), compile="on")
        self.check(self.config(parallel_config={"tensor_parallel_size": 2}))

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size=2"),
            ({"parallel_config": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size=2"),
            ({"cache_config": {"cache_dtype": "fp8"}}, "--kv-cache-dtype auto"),
            ({"cache_config": {"enable_prefix_caching": False}}, "--enable-prefix-caching"),
            ({"model_config": {"use_mla": True}}, "latent attention"),
            ({"pass_config": {"fuse_rope_kvcache": True}}, "fuse_rope_kvcache"),
            ({"kv_transfer_config": {"kv_load_failure_policy": "recompute"}}, "recompute"),
            ({"speculative_config": {"method": "eagle"}}, "eagle"),
        ],
    )
    def test_a_server_that_cannot_be_spliced_on_is_refused_by_name(
        self, changes: dict[str, Any], named: str
    ) -> None:
        """The message says what is in the way."""
        with pytest.raises(CapabilityError, match=named):
            self.check(self.config(**changes))

    def test_several_groups_of_kv_are_refused(self) -> None:
        """A failed load among several groups would end vLLM's engine."""
        with pytest.raises(CapabilityError, match="--disable-hybrid-kv-cache-manager"):
            self.check(self.config(), groups=2)

    def test_compiling_under_tensor_parallelism_is_refused(self) -> None:
        """Each rank sees a part of the heads only."""
        with pytest.raises(CapabilityError, match="tensor parallelism"):
            self.check(self.config(parallel_config={"tensor_parallel_size": 2}), compile="on")

    def test_everything_that_is_in_the_way_is_named_at_once(self) -> None:
        """Starting a server takes minutes: one start tells all."""
        config = self.config(model_config={"use_mla": True}, cache_config={"cache_dtype": "fp8"})
        with pytest.raises(CapabilityError, match=r"fp8.*latent attention"):
            self.check(config)

    def test_an_untested_release_of_vllm_needs_a_word(self) -> None:
        """The message names the override, and the override works."""
        with pytest.raises(CapabilityError, match=r"0\.33\.1.*allow_untested"):
            self.check(self.config(), version="0.33.1")
        self.check(self.config(), version="0.33.1", allow_untested=True)

    @pytest.mark.parametrize(
        ("partner", "fine"), [("OffloadingConnector", True), ("ExampleConnector", False), ("None", False)]
    )
    def test_only_partners_that_keep_salts_apart_are_allowed(self, partner: str, fine: bool) -> None:
        """Another connector may store approximate KV by its tokens alone."""
        from vllm_agentkv.checks import check_partners
        from vllm_agentkv.options import read_options

        entries = [{"kv_connector": "SpliceConnector"}, {"kv_connector": partner}]
        transfer = SimpleNamespace(
            kv_connector="MultiConnector", kv_connector_extra_config={"connectors": entries}
        )
        if fine:
            check_partners(transfer, read_options({"store": "/somewhere"}))
            return
        with pytest.raises(CapabilityError, match=partner):
            check_partners(transfer, read_options({"store": "/somewhere"}))
        check_partners(transfer, read_options({"store": "/somewhere", "allow_untested": True}))


def test_the_scripts_start_a_server_with_the_connector() -> None:
    """Its options go into --kv-transfer-config, and its packages onto the path."""
    from scripts.vllm_server import Options
    from scripts.vllm_server.options import ROOT, command, environment

    options = Options(connector={"store": "/somewhere"}, extra=("--seed", "1"))
    words = command(options, "/model", 8000)
    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert given["kv_connector"] == "SpliceConnector"
    assert given["kv_connector_extra_config"] == {"store": "/somewhere"}
    assert words[-2:] == ["--seed", "1"]
    paths = environment(options, "/model")["PYTHONPATH"].split(":")
    assert paths[:2] == [str(ROOT), str(ROOT / "integrations" / "vllm")]


def test_a_server_without_the_connector_is_started_as_before() -> None:
    """Nothing of it is in its command line."""
    from scripts.vllm_server import Options
    from scripts.vllm_server.options import command

    assert "--kv-transfer-config" not in command(Options(), "/model", 8000)
