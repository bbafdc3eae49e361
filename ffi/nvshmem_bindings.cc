// The Python module jax_overlap._ffi_nvshmem, loaded where a program has several processes:
// NVSHMEM and the kernels that put with it. jax_overlap/_nvshmem.py finds and loads it.
#include "nanobind/nanobind.h"

#include <cuda_runtime.h>

#include <array>
#include <stdexcept>
#include <string>

#include "core/nvshmem_process.h"
#include "ops/psum_nvshmem.h"

namespace nb = nanobind;
using namespace jax_overlap;  // NOLINT

namespace {

// Collective calls wait for other processes, whose threads may need ours: without the GIL.
using NoGil = nb::call_guard<nb::gil_scoped_release>;

nb::tuple Tuple(const std::array<int, 3>& version) {
  return nb::make_tuple(version[0], version[1], version[2]);
}

nb::bytes UniqueId() {
  const std::string id = NvshmemUniqueId();
  return nb::bytes(id.data(), id.size());
}

void Init(int rank, int size, int device, nb::bytes unique_id) {
  const std::string id(unique_id.c_str(), unique_id.size());
  nb::gil_scoped_release no_gil;
  InitNvshmem(rank, size, device, id);
  const cudaError_t error = LoadPsumOverPut();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("jax_overlap: the NVSHMEM kernels do not load: ") +
                             cudaGetErrorString(error) + ".");
  }
}

uintptr_t Allocate(size_t bytes) { return reinterpret_cast<uintptr_t>(AllocateSymmetric(bytes)); }

uintptr_t Peer(uintptr_t address, int pe) {
  return reinterpret_cast<uintptr_t>(PeerAddress(reinterpret_cast<char*>(address), pe));
}

}  // namespace

NB_MODULE(_ffi_nvshmem, m) {
  m.attr("built_version") = Tuple(BuiltNvshmemVersion());
  m.attr("built_cuda") = CUDART_VERSION / 1000;
  m.def("runtime_version", [] { return Tuple(RuntimeNvshmemVersion()); });
  m.def("unique_id", &UniqueId);
  m.def("init", &Init, nb::arg("rank"), nb::arg("size"), nb::arg("device"), nb::arg("unique_id"));
  m.def("allocate", &Allocate, nb::arg("bytes"), NoGil());
  m.def("peer_address", &Peer, nb::arg("address"), nb::arg("pe"));
  m.def(
      "put_kernels", [] { return reinterpret_cast<uintptr_t>(&LaunchPsumOverPut); },
      "The address of LaunchPsumOverPut (ops/psum_nvshmem.h)");
}
