#include "core/nvshmem_process.h"

#include <cuda_runtime.h>
#include <nvshmem_host.h>

#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <tuple>

namespace jax_overlap {
namespace {

struct Membership {
  int rank;
  int size;
  int device;
  std::string unique_id;

  bool operator==(const Membership& other) const {
    return std::tie(rank, size, device, unique_id) ==
           std::tie(other.rank, other.size, other.device, other.unique_id);
  }
  std::string Text() const {
    return "rank " + std::to_string(rank) + " of " + std::to_string(size) + " on CUDA device " +
           std::to_string(device);
  }
};

std::mutex mutex;                      // held through an init, so that a second one waits
std::optional<Membership> membership;  // after a successful init

void Check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error("jax_overlap: " + what + " failed: " + cudaGetErrorString(error) +
                           " (CUDA error " + std::to_string(error) + ").");
}

void CheckNvshmem(int code, const std::string& what) {
  if (code == 0) return;
  throw std::runtime_error("jax_overlap: " + what + " failed with NVSHMEM code " +
                           std::to_string(code) + ". NVSHMEM_DEBUG=INFO makes it say why.");
}

// NVSHMEM is one for all libraries of a process, and takes the numbers of the first init alone
// (NVIDIA/nvshmem#68). Only to be asked when it runs: it ends the process otherwise.
void CheckRunsAs(const Membership& wanted) {
  const int rank = nvshmem_my_pe(), size = nvshmem_n_pes();
  if (rank == wanted.rank && size == wanted.size) return;
  throw std::runtime_error(
      "jax_overlap: NVSHMEM already runs in this process, started by another library, as PE " +
      std::to_string(rank) + " of " + std::to_string(size) + ", and jax_overlap needs it as " +
      wanted.Text() +
      ". It starts once in a process: start it with the processes of jax.distributed, in "
      "their order, or leave it to jax_overlap.");
}

}  // namespace

std::array<int, 3> BuiltNvshmemVersion() {
  return {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};
}

std::array<int, 3> RuntimeNvshmemVersion() {
  std::array<int, 3> version;
  nvshmemx_vendor_get_version_info(&version[0], &version[1], &version[2]);
  return version;
}

std::string NvshmemUniqueId() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  CheckNvshmem(nvshmemx_get_uniqueid(&id), "making a unique id");
  return std::string(reinterpret_cast<const char*>(&id), sizeof(id));
}

void InitNvshmem(int rank, int size, int device, const std::string& unique_id) {
  const Membership wanted{rank, size, device, unique_id};
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (unique_id.size() != sizeof(id)) {
    throw std::runtime_error("jax_overlap: an NVSHMEM unique id has " + std::to_string(sizeof(id)) +
                             " bytes, this one has " + std::to_string(unique_id.size()) + ".");
  }
  std::memcpy(&id, unique_id.data(), sizeof(id));

  std::lock_guard<std::mutex> lock(mutex);
  if (membership.has_value()) {
    if (*membership == wanted) return;
    throw std::runtime_error(
        "jax_overlap: NVSHMEM runs in this process as " + membership->Text() +
        " and cannot be started again as " + wanted.Text() +
        (membership->Text() == wanted.Text() ? " with another unique id" : "") +
        ". Start new processes.");
  }
  Check(cudaSetDevice(device), "choosing CUDA device " + std::to_string(device));
  Check(cudaFree(nullptr), "starting CUDA device " + std::to_string(device));
  if (nvshmemx_init_status() >= NVSHMEM_STATUS_IS_BOOTSTRAPPED) CheckRunsAs(wanted);

  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  CheckNvshmem(nvshmemx_set_attr_uniqueid_args(rank, size, &id, &attributes),
               "describing " + wanted.Text());
  // What the header's nvshmemx_init_attr does, except that it ends the process on failure.
  // Where NVSHMEM runs already, this makes it known to the kernels of this library.
  int provided;
  const auto [major, minor, patch] = BuiltNvshmemVersion();
  CheckNvshmem(
      nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, NVSHMEMX_INIT_WITH_UNIQUEID,
                           &attributes, nvshmemi_version_t{major, minor, patch}),
      "starting NVSHMEM as " + wanted.Text());
  if (nvshmemx_init_status() < NVSHMEM_STATUS_IS_INITIALIZED) {
    throw std::runtime_error("jax_overlap: NVSHMEM started as " + wanted.Text() +
                             ", but without a GPU.");
  }
  CheckRunsAs(wanted);
  membership = wanted;
}

char* AllocateSymmetric(size_t bytes) {
  // The barriers, too: what is allocated is zero everywhere before anybody stores there.
  void* const address = nvshmem_malloc(bytes);
  if (address == nullptr) {
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw std::runtime_error(
        "jax_overlap: no room for a symmetric heap of " + std::to_string(bytes) +
        " bytes; the device has " + std::to_string(free) + " of " + std::to_string(total) +
        " bytes free. Lower JAX_OVERLAP_HEAP_BYTES, leave more of the device to it with "
        "XLA_PYTHON_CLIENT_MEM_FRACTION, or, if NVSHMEM_SYMMETRIC_SIZE is set, raise that: it "
        "has to be larger than the heap by 32 MiB.");
  }
  Check(cudaMemset(address, 0, bytes), "clearing the symmetric heap");
  Check(cudaDeviceSynchronize(), "clearing the symmetric heap");
  nvshmem_barrier_all();
  return static_cast<char*>(address);
}

char* PeerAddress(char* address, int pe) { return static_cast<char*>(nvshmem_ptr(address, pe)); }

}  // namespace jax_overlap
