# SPDX-License-Identifier: BSD-3-Clause
"""The layout of the kernels hub: made by cmake/hub.py and loaded by `kernels` beside the ordinary
package.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import build_alone, run_python

pytest.importorskip("kernels")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    if not (ROOT / "build" / "CMakeCache.txt").exists():
        pytest.skip("build/ is not configured; make build")
    folder = tmp_path_factory.mktemp("hub")
    with build_alone():
        made = subprocess.run(
            [sys.executable, ROOT / "cmake" / "hub.py", folder], capture_output=True, text=True
        )
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def test_metadata(hub):
    """The metadata of the build's own variant, and of the variant for a torch without CUDA."""
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    built = (ROOT / "build" / "hub_backend").read_text().split(" ")[0]
    variants = {
        v.name.removeprefix("torch-stable-abi210-").split("-")[0]: v
        for v in (hub / "build").iterdir()
    }
    assert set(variants) == {built, "cpu"}
    for backend, variant in variants.items():
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert metadata.id.startswith(f"_gpukern_{backend}_") and metadata.license == "BSD-3-Clause"
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
        about = json.loads((variant / "metadata.json").read_text())["backend"]
        assert about == (
            {"type": "cpu"} if backend == "cpu" else {"type": "cuda", "archs": ["8.0", "9.0a"]}
        )


def test_the_variant_of_a_cuda_build(monkeypatch, tmp_path):
    """The variant's name and metadata are those that the kernels package looks for on a machine
    with a GPU: the toolkit's version and the compiled architectures."""
    from kernels._rust import Digest, DigestAlgorithm, Metadata
    from kernels.archs import _supports_cuda_capability
    from kernels.backends import CUDA, Version
    from kernels.variants import _resolve_variant_for_system, get_variants_local

    hub = module_of_hub()
    build = tmp_path / "tree"
    build.mkdir()
    (build / "CMakeCache.txt").touch()
    (build / "hub_backend").write_text("cu130 80;90a")  # as CMakeLists.txt writes it with nvcc 13.0
    (build / "libgpukern_hub.so").write_bytes(b"a library")
    monkeypatch.setattr(hub, "BUILD", build)
    monkeypatch.setattr(hub, "configure", lambda *options: None)
    namespaces = []
    monkeypatch.setattr(
        hub, "build", lambda namespace: namespaces.append(namespace) or build / "libgpukern_hub.so"
    )
    machine, system = hub.platform.machine(), hub.platform.system().lower()
    variant, other = hub.make(tmp_path / "hub")
    assert other.name == f"torch-stable-abi210-cpu-{machine}-{system}" and namespaces[1].startswith(
        "_gpukern_cpu_"
    )
    assert variant == tmp_path / "hub" / "build" / f"torch-stable-abi210-cu130-{machine}-{system}"
    assert (variant / "libgpukern_torch.so").read_bytes() == b"a library"
    assert f'NAMESPACE = "{namespaces[0]}"' in (variant / "_library.py").read_text()
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert metadata.id == namespaces[0] and metadata.id.startswith("_gpukern_cu130_")
    assert json.loads((variant / "metadata.json").read_text())["backend"] == {
        "type": "cuda",
        "archs": ["8.0", "9.0a"],
    }
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    for capability, served in (
        ((8, 0), True),
        ((8, 9), True),
        ((9, 0), True),
        ((7, 5), False),
        ((10, 0), False),
    ):
        assert _supports_cuda_capability(metadata.backend.archs, capability) == served
    for torch_version in ("2.10", "2.13"):
        versions = {
            "torch_version": Version(torch_version),
            "torch_cxx11_abi": True,
            "tvm_ffi_version": None,
        }
        found, _ = _resolve_variant_for_system(
            get_variants_local(variant.parent),
            CUDA(version=Version("13.0")),
            machine,
            system,
            **versions,
        )
        assert [v.variant_str for v in found] == [variant.name]


def module_of_hub():
    spec = importlib.util.spec_from_file_location("hub", ROOT / "cmake" / "hub.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_loads_beside_the_package(hub):
    """In either order. Functions, gradients, compiled code, errors and registered names of each are
    separate."""
    for first in ("kernel", "package"):
        run_python(f"""
            import pathlib, torch, torch.nn.functional as F
            from kernels import get_local_kernel

            def kernel():
                return get_local_kernel(pathlib.Path({str(hub)!r}))

            def package():
                import torch_gpukern
                return torch_gpukern

            ours = {first}()
            other = package() if ours.__name__ != "torch_gpukern" else kernel()
            k, p = (ours, other) if other.__name__ == "torch_gpukern" else (other, ours)
            assert k.__name__.startswith("_gpukern_") and k.__file__ != p.__file__
            assert {{"flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"}} <= set(k.__all__)
            q, key, v = (torch.randn(2, 9, h, 16, requires_grad=True) for h in (4, 2, 2))
            out = k.flash_attn_func(q, key, v, causal=True)
            args = [x.transpose(1, 2) for x in (q, key, v)]
            want = F.scaled_dot_product_attention(*args, is_causal=True, enable_gqa=True).transpose(1, 2)
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(p.flash_attn(*args, is_causal=True).transpose(1, 2), want)
            for mine, theirs in zip(*(torch.autograd.grad(x.square().sum(), (q, key, v)) for x in (out, want))):
                torch.testing.assert_close(mine, theirs)
            a, b = torch.randn(5, 7), torch.randn(7, 3)
            compiled = torch.compile(lambda a, b: k.gemm(a, b) + p.gemm(a, b), fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(a, b), 2 * (a @ b))
            for module, name in ((k, k.__name__), (p, "gpukern")):
                assert getattr(torch.ops, name).gemm(a, b).shape == (5, 3)
                try:
                    module.gemm(a, a)
                except ValueError as error:
                    assert str(error).startswith(name + "::gemm: b has 5 rows"), error
        """)


def test_transformers_route(hub):
    """As an attention of transformers by a repository's name: logits, generate, continuous
    batching."""
    pytest.importorskip("transformers")
    run_python(
        """
        import torch, transformers, transformers.utils.import_utils as utils
        # transformers takes newer kernels than there are to be had with this pin; what it calls is the same.
        utils.is_kernels_available.__wrapped__.__defaults__ = ("0.1", "99")
        utils.is_kernels_available.cache_clear()
        from test_integrations_transformers import FAMILIES, build, words

        eager, model = (build(FAMILIES["llama"], "eager") for _ in range(2))
        model.set_attn_implementation("you/gpukern-flash-attn3", allow_all_kernels=True)
        assert model.config._attn_implementation == "you/gpukern-flash-attn3"
        ids = words(2, 19)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, eager(ids).logits)
        options = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), eager.generate(ids, **options))
        prompts = [words(1, n, seed=n) for n in (5, 19, 11)]
        want = {tuple(p[0].tolist()): eager.generate(p, **options)[0, p.shape[1]:].tolist() for p in prompts}
        found = model.generate_batch(
            inputs=[list(p) for p in want], progress_bar=False,
            generation_config=transformers.GenerationConfig(**options, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=64, page_size=8, max_batch_tokens=16),
        )
        assert {tuple(out.prompt_ids): out.generated_tokens for out in found.values()} == want
        """,  # noqa: E501
        env={"LOCAL_KERNELS": f"you/gpukern-flash-attn3={hub}"},
    )
