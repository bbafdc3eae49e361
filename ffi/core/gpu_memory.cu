#include "core/gpu_memory.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>

#include "core/gpu_device.h"

namespace jax_overlap {
namespace {

constexpr int kProbeWords = kProbeBytes / sizeof(uint64_t);

__device__ uint64_t Pattern(int from, int to, int word) {
  return 0x9e3779b97f4a7c15ull * (static_cast<uint64_t>(from) << 20 | to << 4 | word) + 1;
}

// One thread a peer.
__global__ void ProbeKernel(char* const* heaps, int size, int rank, uint64_t limit_ns,
                            int32_t* results) {
  const int peer = threadIdx.x + blockIdx.x * blockDim.x;
  if (peer >= size || peer == rank || heaps[peer] == nullptr) return;
  auto* const sent = reinterpret_cast<volatile uint64_t*>(heaps[peer] + rank * kProbeBytes);
  auto* const came = reinterpret_cast<volatile uint64_t*>(heaps[rank] + peer * kProbeBytes);
  for (int i = 0; i < kProbeWords; ++i) sent[i] = Pattern(rank, peer, i);
  __threadfence_system();
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  for (int i = 0; i < kProbeWords; ++i) {
    while (came[i] != Pattern(peer, rank, i)) {
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
      if (now - start > limit_ns) {
        results[peer] = kProbeNothingCame;
        return;
      }
    }
  }
  for (int i = 0; i < kProbeWords; ++i) {
    if (sent[i] != Pattern(rank, peer, i)) results[peer] = kProbeReadBack;
  }
}

std::string Text(const char* what, int ordinal, cudaError_t error) {
  return std::string(what) + " on device " + std::to_string(ordinal) + ": " +
         cudaGetErrorString(error);
}

// What call sites have left. Python ends them with the GIL held, so nobody waits in this lock.
struct LeftMemory {
  static LeftMemory& Get() {
    static LeftMemory* const left = new LeftMemory;
    return *left;
  }
  std::mutex mutex;
  std::map<std::pair<int, size_t>, std::vector<char*>> of;  // a device, so many bytes
};

// Numbers of 0.5 to 2 and of both signs in each type: bits of zero cost less power.
__global__ void Fill(uint32_t* words, size_t count) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += stride) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    words[i] = 0x3f003f00u | (h & 0x80ff80ffu);
  }
}

}  // namespace

CurrentDevice::CurrentDevice(int ordinal) {
  cudaGetDevice(&before_);
  cudaSetDevice(ordinal);
}
CurrentDevice::~CurrentDevice() { cudaSetDevice(before_); }

void FillForTuning(char* memory, size_t bytes, cudaStream_t stream) {
  Fill<<<1024, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(memory), bytes / sizeof(uint32_t));
}

std::string EnablePeers(const std::vector<int>& ordinals) {
  for (const int from : ordinals) {
    const CurrentDevice current(from);
    for (const int to : ordinals) {
      if (from == to) continue;
      int can = 0;
      cudaError_t error = cudaDeviceCanAccessPeer(&can, from, to);
      if (error == cudaSuccess && can) error = cudaDeviceEnablePeerAccess(to, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();  // XLA has done it
        continue;
      }
      if (error != cudaSuccess) return Text("peer access failed", from, error);
      if (!can) {
        return "device " + std::to_string(from) + " cannot address the memory of device " +
               std::to_string(to) + " (no peer access between them: see nvidia-smi topo -p2p r)";
      }
    }
  }
  return "";
}

std::string AllocateForGood(int ordinal, size_t bytes, char** memory) {
  const CurrentDevice current(ordinal);
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  cudaError_t error = cudaMalloc(memory, bytes);
  if (error == cudaSuccess) error = cudaMemset(*memory, 0, bytes);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) return "";
  cudaGetLastError();
  return Text("no memory", ordinal, error) + ". " + std::to_string(bytes) +
         " bytes were asked for, " + std::to_string(free) +
         " are free; XLA takes its share first (XLA_PYTHON_CLIENT_MEM_FRACTION)";
}

std::unique_ptr<SiteMemory> SiteMemory::Take(int ordinal, size_t bytes, std::string* error) {
  size_t whole = 1024;
  while (whole < bytes) whole *= 2;
  std::unique_ptr<SiteMemory> taken(new SiteMemory(ordinal, whole));
  LeftMemory& left = LeftMemory::Get();
  {
    std::lock_guard<std::mutex> lock(left.mutex);
    std::vector<char*>& alike = left.of[{ordinal, whole}];
    if (!alike.empty()) {
      taken->data_ = alike.back();
      alike.pop_back();
      return taken;
    }
  }
  const RelaxedCapture relaxed;
  *error = AllocateForGood(ordinal, whole, &taken->data_);
  return error->empty() ? std::move(taken) : nullptr;
}

SiteMemory::~SiteMemory() {
  if (data_ == nullptr) return;
  LeftMemory& left = LeftMemory::Get();
  std::lock_guard<std::mutex> lock(left.mutex);
  left.of[{ordinal_, bytes_}].push_back(data_);
}

std::string ClearMemory(int ordinal, const std::vector<std::pair<char*, size_t>>& ranges) {
  const CurrentDevice current(ordinal);
  const RelaxedCapture relaxed;
  cudaStream_t stream = nullptr;  // does not wait for the others
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  for (const auto& [begin, bytes] : ranges) {
    if (error == cudaSuccess) error = cudaMemsetAsync(begin, 0, bytes, stream);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (stream != nullptr) cudaStreamDestroy(stream);
  return error == cudaSuccess ? "" : Text("clearing the symmetric heap failed", ordinal, error);
}

std::string LoadKernels(const std::vector<int>& ordinals, const std::vector<const void*>& kernels) {
  for (const int ordinal : ordinals) {
    const CurrentDevice current(ordinal);
    for (const void* kernel : kernels) {
      cudaFuncAttributes attributes;
      const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
      if (error != cudaSuccess) return Text("a kernel does not load", ordinal, error);
    }
  }
  return "";
}

std::string ProbeHeaps(const std::vector<Prober>& probers, const std::vector<char*>& heaps,
                       uint64_t limit_ns, std::vector<std::vector<int32_t>>* results) {
  constexpr int kThreads = 64;
  const int size = static_cast<int>(heaps.size());
  results->assign(probers.size(), std::vector<int32_t>(size, kProbeOk));
  struct Launched {
    cudaStream_t stream;
    char** heaps;
    int32_t* results;
  };
  std::vector<Launched> launched(probers.size());
  // Whatever allocates comes before whatever waits.
  for (size_t i = 0; i < probers.size(); ++i) {
    const int ordinal = probers[i].ordinal;
    const CurrentDevice current(ordinal);
    Launched& l = launched[i];
    cudaError_t error = cudaStreamCreateWithFlags(&l.stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaMalloc(&l.heaps, size * sizeof(char*));
    if (error == cudaSuccess) error = cudaMalloc(&l.results, size * sizeof(int32_t));
    if (error == cudaSuccess) error = cudaMemset(l.results, 0, size * sizeof(int32_t));
    if (error == cudaSuccess) {
      error = cudaMemcpy(l.heaps, heaps.data(), size * sizeof(char*), cudaMemcpyHostToDevice);
    }
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, ProbeKernel);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (error != cudaSuccess) return Text("the probe of peers failed", ordinal, error);
  }
  for (size_t i = 0; i < probers.size(); ++i) {
    const CurrentDevice current(probers[i].ordinal);
    ProbeKernel<<<(size + kThreads - 1) / kThreads, kThreads, 0, launched[i].stream>>>(
        launched[i].heaps, size, probers[i].rank, limit_ns, launched[i].results);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return Text("the probe of peers failed", probers[i].ordinal, error);
  }
  for (size_t i = 0; i < probers.size(); ++i) {
    const CurrentDevice current(probers[i].ordinal);
    cudaError_t error = cudaStreamSynchronize(launched[i].stream);
    if (error == cudaSuccess) {
      error = cudaMemcpy((*results)[i].data(), launched[i].results, size * sizeof(int32_t),
                         cudaMemcpyDeviceToHost);
    }
    if (error != cudaSuccess) return Text("the probe of peers failed", probers[i].ordinal, error);
  }
  for (size_t i = 0; i < probers.size(); ++i) {
    const CurrentDevice current(probers[i].ordinal);
    cudaFree(launched[i].heaps);
    cudaFree(launched[i].results);
    cudaStreamDestroy(launched[i].stream);
  }
  return "";
}

}  // namespace jax_overlap
