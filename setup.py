"""Builds the two native libraries: `_native/libqwen_patch_cpu.so`, and `_native/libqwen_patch_cuda.so` where nvcc is.

Both stand on PyTorch's stable ABI, with no Python in them, so one binary serves every torch >= 2.10 and every Python.
They need torch's headers and nothing else of it, not even to import it: torch.utils.cpp_extension links libtorch_python
and c10 and refuses a .cu file under a CPU-only torch, so the compilers are called here. A library that can't be built
is left out with one line that says why; the ops then use their PyTorch reference.

There are no locks: each build works in a folder of its own, and a finished library takes its place in one step. Builds
may run at once, be killed, or go on while a program has the old library loaded.
"""

import importlib.machinery
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10: the oldest torch that loads the result
CUDA_ARCHITECTURES = ["80", "90a"]
# Whether a library that can't be built is an error.
REQUIRED = os.environ.get("QWEN_PATCH_REQUIRE_NATIVE", "0") not in ("", "0")


class CannotBuild(RuntimeError):
    """One line: what is missing."""


def environment_paths() -> list[str]:
    """Where the environment's own packages are, a user's and a surrounding environment's that it shows too.

    pip isolates a build by these two variables: a Python started without them sees what users see.
    """
    visible = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    command = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"]
    return subprocess.run(command, env=visible, capture_output=True, text=True, check=True).stdout.splitlines()


def torch_folder() -> Path:
    """The installed torch, which an isolated build hides from sys.path."""
    spec = importlib.machinery.PathFinder.find_spec("torch", [*sys.path, *environment_paths()])
    if spec is None or not spec.submodule_search_locations:
        raise CannotBuild("torch is not installed in this environment: install torch first, then qwen_patch again")
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / "include/torch/csrc/stable/ops.h").exists():
        raise CannotBuild(f"the torch in {folder} is older than 2.10: it has no stable C++ ABI")
    return folder


def compiler() -> list[str]:
    """CXX with its arguments (`ccache g++`), or g++; clang++ has not all that the CPU kernels are written with."""
    found = shlex.split(os.environ.get("CXX") or "") or [shutil.which("g++") or shutil.which("c++") or "g++"]
    if not shutil.which(found[0]):
        where = f" at CXX={found[0]}" if os.environ.get("CXX") else ""
        raise CannotBuild(f"no C++ compiler found{where}: install g++ (12 or newer) or set CXX")
    return found


def nvcc() -> str:
    """CUDA_HOME's, where that is set: so CUDA_HOME=/nowhere leaves the CUDA library out."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [f"{home}/bin/nvcc"] if home else [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if candidate and Path(candidate).exists():
            return candidate
    raise CannotBuild(
        f"no nvcc found{f' in CUDA_HOME={home}' if home else ''}: install the CUDA toolkit or set CUDA_HOME"
    )


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    output = (result.stdout + result.stderr).strip()
    if result.returncode != 0:
        if REQUIRED:
            raise CannotBuild(f"{' '.join(command)}\n{output}")
        lines = output.splitlines() or ["it said nothing"]
        error = next((line for line in lines if "error" in line.lower() or "fatal" in line.lower()), lines[-1])
        raise CannotBuild(f"{command[0]} failed: {error} (QWEN_PATCH_REQUIRE_NATIVE=1 shows all of it)")
    if result.stderr.strip():
        print(result.stderr.strip(), file=sys.stderr)


def compile_all(command: list[str], sources: list[Path], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: run([*command, "-c", str(job[0]), "-o", job[1]]), zip(sources, objects, strict=True)))
    return objects


def build_cpu(output: Path, temp: Path) -> None:
    torch, cxx = torch_folder(), compiler()
    flags = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]
    flags += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", STABLE_ABI]
    flags += ["-isystem", str(torch / "include"), *os.environ.get("CXXFLAGS", "").split()]
    objects = compile_all([*cxx, *flags], sorted((ROOT / "csrc/cpu").glob("*.cpp")), temp / "cpu")
    run([*cxx, "-shared", *objects, "-o", str(output), f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"])


def build_cuda(output: Path, temp: Path) -> None:
    torch, cxx, cuda = torch_folder(), compiler(), nvcc()
    flags = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", STABLE_ABI]
    host = next(part for part in reversed(cxx) if not part.startswith("-"))  # without ccache and the like
    flags += ["-ccbin", host, "-isystem", str(torch / "include")]
    for architecture in CUDA_ARCHITECTURES:
        flags += [f"-gencode=arch=compute_{architecture},code=sm_{architecture}"]
    # Cards between and beyond these run the oldest one's PTX.
    flags += [f"-gencode=arch=compute_{CUDA_ARCHITECTURES[0]},code=compute_{CUDA_ARCHITECTURES[0]}"]
    # One translation unit: nvcc reads torch's headers once an architecture, not once a file and architecture (93 s
    # before, 30 s after, on 2 cores).
    unity = temp / "cuda" / "all.cu"
    unity.parent.mkdir(parents=True, exist_ok=True)
    unity.write_text("".join(f'#include "{source}"\n' for source in sorted((ROOT / "csrc/cuda").glob("*.cu"))))
    objects = compile_all([cuda, "--threads", "0", *flags], [unity], temp / "cuda")
    # A CPU-only torch has no libtorch_cuda.so to link. An empty one with that soname makes the loader take the symbols
    # from the real one on the machine that runs the library.
    stub = temp / "stub"
    stub.mkdir(parents=True, exist_ok=True)
    source = stub / "empty.cpp"
    source.write_text("")
    run([*cxx, "-shared", "-Wl,-soname,libtorch_cuda.so", str(source), "-o", str(stub / "libtorch_cuda.so")])
    link = [f"-L{stub}", f"-L{torch / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch_cuda", "-ltorch_cpu"]
    run([cuda, "-shared", "-ccbin", host, "-cudart", "static", *objects, "-o", str(output), *link])


def put(library: Path, target: Path) -> None:
    """Copies the library to its place in one step: nobody ever loads a half-written one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as partial:
        pass
    try:
        shutil.copyfile(library, partial.name)
        os.chmod(partial.name, 0o755)
        os.replace(partial.name, target)
    finally:
        Path(partial.name).unlink(missing_ok=True)


LIBRARIES = {"cpu": build_cpu, "cuda": build_cuda}


class BuildNative(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        package, _, name = fullname.rpartition(".")
        return os.path.join(*package.split("."), f"{name}.so")  # no interpreter tag: there is no Python in it

    def build_extension(self, ext: Extension) -> None:
        kind = ext.name.rpartition("_")[2]
        output = Path(self.get_ext_fullpath(ext.name))
        try:
            if sys.platform != "linux":
                raise CannotBuild(f"the native libraries are built on Linux only, this is {sys.platform}")
            with tempfile.TemporaryDirectory(prefix="qwen_patch-") as folder:
                fresh = Path(folder) / output.name
                LIBRARIES[kind](fresh, Path(folder))
                put(fresh, output)
        except CannotBuild as reason:
            if REQUIRED:
                raise
            output.unlink(missing_ok=True)  # a library of an older source must not be taken for this one's
            print(f"qwen_patch: the {kind} library was not built: {reason}", file=sys.stderr)

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            name = self.get_ext_filename(ext.name)
            built, target = Path(self.build_lib) / name, ROOT / name
            if built.exists():
                put(built, target)
            else:
                target.unlink(missing_ok=True)


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(f"qwen_patch._native.libqwen_patch_{kind}", sources=[], optional=True) for kind in LIBRARIES
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
