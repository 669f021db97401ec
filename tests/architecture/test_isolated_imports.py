"""Every module can be imported alone, without a warning, and the server's own side does without torch."""

import subprocess
import sys

import pytest

from tests.architecture.sources import module_name, source_files

# One process per group, one fork per module: a fork has imported nothing but what the group shares.
IMPORT_EACH = """
import importlib, os, sys, traceback, warnings
for name in {shared!r}:
    importlib.import_module(name)
warnings.simplefilter("error")
failed = []
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        failed.append(name)
sys.exit("cannot be imported alone: " + ", ".join(failed) if failed else 0)
"""

# Foreign packages whose own import warns or is slow are imported once, before warnings become errors.
GROUPS = {
    "gpu": ["torch", "numpy", "safetensors.torch", "tqdm"],
    "": ["aiohttp.web", "gguf", "jinja2.sandbox", "msgspec", "numpy", "prometheus_client", "tokenizers"],
}


def modules(*, of_gpu: bool) -> list[str]:
    names = [module_name(path) for path in source_files()]
    return [f"asyncserve.{name}".rstrip(".") for name in names if name.startswith("gpu") == of_gpu]


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_module_can_be_imported_alone_without_a_warning(group: str) -> None:
    script = IMPORT_EACH.format(shared=GROUPS[group])
    command = [sys.executable, "-c", script, *modules(of_gpu=group == "gpu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_engine_and_http_application_leave_torch_out() -> None:
    script = (
        "import sys, asyncserve.cli, asyncserve.serve, asyncserve.loop.engine, asyncserve.http.app\n"
        "sys.exit(', '.join({'torch', 'transformers', 'triton', 'uvloop'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"imported: {done.stderr}"


@pytest.mark.slow
def test_the_package_itself_imports_neither_asyncio_nor_the_engine() -> None:
    script = (
        "import sys, asyncserve\n"
        "asyncserve.SamplingParams, asyncserve.Request, asyncserve.ConfigError, asyncserve.__version__\n"
        "sys.exit(', '.join({'asyncio', 'torch', 'asyncserve.serve', 'aiohttp'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"imported: {done.stderr}"
