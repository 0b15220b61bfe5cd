"""The optional C extensions; everything else is in pyproject.toml."""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError


class OptionalBuild(build_ext):
    """Without a compiler the package is complete, only slower: one line says so."""

    def build_extension(self, ext: Extension) -> None:
        """Build an extension, or say that it was left out."""
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            reason = str(error).splitlines()[0]
            self.warn(f"{ext.name} was not built, the slower numpy path is used instead ({reason})")


setup(
    ext_modules=[
        Extension(
            "kvtier.native._codecs",
            ["kvtier/native/_codecs.c"],
            depends=["kvtier/native/_kernels.h"],
            # Contraction to fused multiply-adds would make results depend on the CPU.
            extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
            optional=True,
        ),
        Extension(
            "kvtier.native._attention",
            ["kvtier/native/_attention.c"],
            depends=["kvtier/native/_attention_kernels.h"],
            # Norms and rotations round as torch does; attention asks for fused multiply-adds by name.
            extra_compile_args=[
                "-O3",
                "-std=c11",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fopenmp",
            ],
            extra_link_args=["-fopenmp"],
            optional=True,
        ),
        Extension(
            "kvtier.native._products",
            ["kvtier/native/_products.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            optional=True,
        ),
        Extension(
            "kvtier.native._checksum",
            ["kvtier/native/_checksum.c", "kvtier/native/_receiving.c"],
            depends=["kvtier/native/_steps.h", "kvtier/native/_vectored.h"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
    ],
    cmdclass={"build_ext": OptionalBuild},
    # MANIFEST.in is for the source archive alone; what a wheel has beside modules is in pyproject.toml.
    include_package_data=False,
)
