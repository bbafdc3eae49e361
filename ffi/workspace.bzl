"""Bazel's external repositories, all made from what is installed on this machine."""

def local_repositories():
    """Defines @site (Python, Eigen, jaxlib's and nanobind's C++), and stand-ins for the rest."""
    _installed_packages(name = "site")

    # Bazel loads these by name even where only cc_* and py_* rules are used.
    _stand_in(name = "rules_cc", package = "cc", rules = [
        "cc_binary",
        "cc_import",
        "cc_library",
        "cc_proto_library",
        "cc_test",
        "cc_toolchain",
        "cc_toolchain_suite",
        "fdo_prefetch_hints",
        "fdo_profile",
        "objc_import",
        "objc_library",
    ])
    _stand_in(name = "rules_java", package = "java", rules = [
        "java_binary",
        "java_import",
        "java_library",
        "java_lite_proto_library",
        "java_package_configuration",
        "java_plugin",
        "java_proto_library",
        "java_runtime",
        "java_test",
        "java_toolchain",
    ])
    _stand_in(name = "rules_proto", package = "proto", rules = [
        "proto_lang_toolchain",
        "proto_library",
    ])
    _stand_in(name = "remote_coverage_tools", targets = [
        "coverage_report_generator",
        "lcov_merger",
    ])

# --- Stand-ins: forward to the rules that Bazel itself has --------------------

def _stand_in_impl(ctx):
    ctx.file("%s/BUILD" % ctx.attr.package)
    ctx.file(
        "%s/defs.bzl" % ctx.attr.package,
        "".join(["%s = native.%s\n" % (rule, rule) for rule in ctx.attr.rules]),
    )
    ctx.file("BUILD", "".join([
        "filegroup(name = '%s', visibility = ['//visibility:public'])\n" % target
        for target in ctx.attr.targets
    ]))

_stand_in = repository_rule(
    implementation = _stand_in_impl,
    attrs = {
        "package": attr.string(default = "unused"),
        "rules": attr.string_list(),
        "targets": attr.string_list(),
    },
)

# --- What is installed for the Python that PYTHON names -----------------------

_FIND = """
import importlib.metadata, importlib.util, sys, sysconfig
print(sys.executable)
print(sysconfig.get_paths()["include"])
eigen = importlib.metadata.distribution("cmeel-eigen")
print(eigen.locate_file("cmeel.prefix/include/eigen3"))
for name in ("jaxlib", "nanobind"):
    print(importlib.util.find_spec(name).submodule_search_locations[0])
"""

_BUILD = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "python",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)

filegroup(
    name = "xla_ffi_headers",
    srcs = glob(["jaxlib/**/*.h"]),
)

cc_library(
    name = "xla_ffi",
    hdrs = [":xla_ffi_headers"],
    includes = ["jaxlib"],
)

cc_library(
    name = "eigen",
    hdrs = glob(["eigen/Eigen/**"]),
    includes = ["eigen"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h"]),
    copts = ["-std=c++17", "-fvisibility=hidden", "-fno-strict-aliasing", "-O2"],
    includes = ["nanobind/include", "nanobind/ext/robin_map/include"],
    textual_hdrs = glob(["nanobind/src/*", "nanobind/ext/**/*.h"]),
    deps = [":python"],
)

py_runtime(
    name = "py3",
    interpreter_path = "{python}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "pair",
    py3_runtime = ":py3",
)

toolchain(
    name = "py_toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

def _installed_packages_impl(ctx):
    python = ctx.os.environ.get("PYTHON") or ctx.which("python3")
    result = ctx.execute([python, "-c", _FIND])
    if result.return_code != 0:
        fail("First `%s -m pip install jax nanobind cmeel-eigen`:\n%s" % (python, result.stderr))
    executable, include, eigen, jaxlib, nanobind = result.stdout.strip().split("\n")
    ctx.symlink(include, "python")
    ctx.symlink(eigen, "eigen")
    ctx.symlink(jaxlib + "/include", "jaxlib")
    for folder in ("include", "src", "ext"):
        ctx.symlink(nanobind + "/" + folder, "nanobind/" + folder)
    ctx.file("BUILD", _BUILD.replace("{python}", executable))

_installed_packages = repository_rule(
    implementation = _installed_packages_impl,
    environ = ["PYTHON"],
    local = True,
)
