// The Python module jax_overlap._ffi_cuda: the GPU handlers, and the setting up of the
// GPUs of this process. jax_overlap/_cuda.py says what is done when.
#include "nanobind/nanobind.h"
#include "nanobind/stl/map.h"
#include "nanobind/stl/pair.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/tuple.h"
#include "nanobind/stl/vector.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "core/cublaslt.h"
#include "core/exchange.h"
#include "core/gpu_errors.h"
#include "core/gpu_gemm.h"
#include "core/gpu_memory.h"
#include "core/gpu_op.h"
#include "core/gpu_team.h"
#include "core/handler_tables.h"
#include "core/hopper_gemm.h"
#include "core/ledger.h"
#include "ops/gpu_handlers.h"
#include "ops/psum_launch.h"
#include "ops/psum_nvshmem.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;
using namespace jax_overlap;  // NOLINT

namespace {

const Handler kHandlers[] = {AllGatherMatmulGpuHandler(), MatmulAllReduceGpuHandler(),
                             MatmulReduceScatterGpuHandler(), PsumGpuHandler()};

// What waits for a device, on which a program may wait for a Python callback: without the GIL.
using NoGil = nb::call_guard<nb::gil_scoped_release>;

void Raise(const std::string& error) {
  if (!error.empty()) throw std::runtime_error(error);
}

std::vector<char*> Addresses(const std::vector<uintptr_t>& numbers) {
  std::vector<char*> addresses;
  for (const uintptr_t number : numbers) addresses.push_back(reinterpret_cast<char*>(number));
  return addresses;
}

// (CUDA of this build, CUDA of the driver), as 1000 * major + 10 * minor; 0: no driver.
std::pair<int, int> CudaVersions() {
  int driver = 0;
  cudaDriverGetVersion(&driver);
  return {CUDART_VERSION, driver};
}

std::string DeviceName(int ordinal) {
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess) return "unknown";
  std::string name;
  for (const char byte : properties.uuid.bytes) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(byte));
    name += digits;
  }
  return name;
}

// f() with the GIL, which threads of XLA that come here do not hold. What it throws can be
// looked at without.
template <class F>
auto InPython(F f) {
  const nb::gil_scoped_acquire gil;
  try {
    return f();
  } catch (const nb::python_error& e) {
    throw std::runtime_error(nb::str(e.value()).c_str());
  }
}

// The Python functions are kept for ever: handlers may call them as long as there are any.
void Configure(std::map<int, int64_t> local, nb::callable make_region, nb::callable agree,
               double wait_timeout_s, int max_blocks, std::string cublaslt,
               std::string tuning_folder) {
  CublasLt::SetPath(std::move(cublaslt));
  GpuGemm::Get().SetCacheFolder(std::move(tuning_folder));
  auto* const make = new nb::callable(std::move(make_region));
  auto* const ask = new nb::callable(std::move(agree));
  using Devices = std::vector<int64_t>;
  using Region =
      std::tuple<std::vector<uintptr_t>, std::vector<uintptr_t>, std::vector<int32_t>, size_t>;
  GpuWorld::Get().Configure(
      {std::move(local),
       [make](const Devices& devices) {
         return InPython([&] {
           const auto [bases, symmetric, processes, bytes] = nb::cast<Region>((*make)(devices));
           return GpuRegion{Addresses(bases), Addresses(symmetric), processes, bytes};
         });
       },
       [ask](const Devices& devices, const std::vector<int>& indices) {
         return InPython([&] { return nb::cast<std::vector<int>>((*ask)(devices, indices)); });
       },
       wait_timeout_s, max_blocks});
}

}  // namespace

NB_MODULE(_ffi_cuda, m) {
  m.attr("api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("probe_bytes") = kProbeBytes;
  m.attr("cutlass") = HopperGemmName()[0] != '\0';
  m.def("targets", [] { return TargetsOf(kHandlers); }, "FFI targets: name -> stage -> capsule");
  m.def(
      "state_types", [] { return StateTypesOf(kHandlers); },
      "FFI state types: name -> type_id, type_info");
  m.def("cuda_versions", &CudaVersions);
  m.def("device_name", &DeviceName, "A name that no other GPU has");
  m.def("share_ledger",
        [](nb::capsule ledger) { Ledger::Use(static_cast<Ledger*>(ledger.data())); });
  m.def("configure", &Configure, nb::arg("local"), nb::arg("make_region"), nb::arg("agree"),
        nb::arg("wait_timeout_s"), nb::arg("max_blocks"), nb::arg("cublaslt"),
        nb::arg("tuning_folder"));
  m.def("use_put_kernels", [](uintptr_t launch_psum) {
    UsePsumOverPut(reinterpret_cast<LaunchPsumOverPutFn*>(launch_psum));
  });
  m.def(
      "start",
      [](const std::vector<int>& ordinals) {
        Raise(LoadKernels(ordinals, PsumKernels()));
        Raise(LoadKernels(ordinals, ExchangeKernels()));
        Raise(GpuErrors::Get().Start());
      },
      nb::arg("ordinals"), NoGil());
  m.def(
      "enable_peers", [](const std::vector<int>& ordinals) { Raise(EnablePeers(ordinals)); },
      NoGil());
  m.def(
      "allocate_heap",
      [](int ordinal, size_t bytes) {
        char* heap = nullptr;
        const std::string error = AllocateForGood(ordinal, bytes, &heap);
        if (!error.empty()) Raise("the symmetric heap (JAX_OVERLAP_HEAP_BYTES): " + error);
        return reinterpret_cast<uintptr_t>(heap);
      },
      NoGil());
  m.def(
      "probe",
      [](const std::vector<std::pair<int, int>>& probers, const std::vector<uintptr_t>& heaps,
         double limit_s) {
        std::vector<Prober> ranks;
        for (const auto& [rank, ordinal] : probers) ranks.push_back({rank, ordinal});
        std::vector<std::vector<int32_t>> results;
        std::string error;
        {
          const nb::gil_scoped_release release;
          error =
              ProbeHeaps(ranks, Addresses(heaps), static_cast<uint64_t>(limit_s * 1e9), &results);
        }
        Raise(error);
        return results;
      },
      nb::arg("probers"), nb::arg("heaps"), nb::arg("limit_s"));
}
