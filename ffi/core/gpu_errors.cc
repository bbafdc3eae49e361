#include "core/gpu_errors.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/ledger.h"

namespace jax_overlap {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(20);

// A word has a cache line to itself.
struct alignas(64) ErrorWord {
  Status status;
};

}  // namespace

// Never freed: kernels and the thread may outlive everything else.
struct GpuErrors::State {
  ErrorWord* words;
  // The generation of the ledger in which something failed last, and what it was first.
  std::atomic<int> failed_in{-1};
  std::string first;

  std::mutex mutex;
  std::vector<std::function<std::string(const Status&)>> describe;  // of a word
  std::vector<size_t> free;
};

GpuErrors& GpuErrors::Get() {
  static GpuErrors* const errors = new GpuErrors;
  return *errors;
}

std::string GpuErrors::Start() {
  if (state_ != nullptr) return "";
  // Memory of our own, registered: what CUDA allocates is gone with its context, and the
  // words are read once more when the process ends.
  const size_t bytes = (kWords + 1) * sizeof(ErrorWord);  // the last is `stopped`
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) return "no host memory for error words";
  const cudaError_t error =
      cudaHostRegister(memory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (error != cudaSuccess) {
    munmap(memory, bytes);
    return std::string("host memory cannot be mapped for GPUs: ") + cudaGetErrorString(error);
  }
  auto* state = new State;
  state->words = static_cast<ErrorWord*>(memory);
  state_ = state;
  Ledger::Get().AddSource([this] { Look(); });
  std::thread([this] {
    for (;;) {
      std::this_thread::sleep_for(kLookEvery);
      Look();
    }
  }).detach();
  return "";
}

int32_t* GpuErrors::stopped() const { return &state_->words[kWords].status.failed; }

Status* GpuErrors::Take(std::function<std::string(const Status&)> describe) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  size_t index = state_->describe.size();
  if (!state_->free.empty()) {
    index = state_->free.back();
    state_->free.pop_back();
    state_->describe[index] = std::move(describe);
  } else if (index < kWords) {
    state_->describe.push_back(std::move(describe));
  } else {
    return nullptr;
  }
  state_->words[index].status = {};
  return &state_->words[index].status;
}

void GpuErrors::Give(Status* word) {
  Look();
  std::lock_guard<std::mutex> lock(state_->mutex);
  const size_t index = reinterpret_cast<ErrorWord*>(word) - state_->words;
  state_->describe[index] = nullptr;
  state_->free.push_back(index);
}

void GpuErrors::Look() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const int generation = Ledger::Get().generation();
  for (size_t i = 0; i < state_->describe.size(); ++i) {
    Status& word = state_->words[i].status;
    const int32_t failed = __atomic_load_n(&word.failed, __ATOMIC_ACQUIRE);
    if (failed == kNone) continue;
    Status status = word;
    status.failed = failed;
    // The next call on the channel, which is broken, says so again.
    __atomic_store_n(&word.failed, kNone, __ATOMIC_RELEASE);
    // What follows from an error that is known is no news.
    const bool known = state_->failed_in.load() == generation;
    if (!state_->describe[i] || (failed == kBroken && known)) continue;
    const std::string text = state_->describe[i](status);
    // At once, since nobody may ever read the result.
    std::fprintf(stderr, "jax_overlap: %s\n", text.c_str());
    std::fflush(stderr);
    Ledger::Get().Record(text);
    if (!known) state_->first = text;
    state_->failed_in.store(generation);
  }
  __atomic_store_n(stopped(), state_->failed_in.load() == generation, __ATOMIC_RELEASE);
}

std::string GpuErrors::Unacknowledged() {
  const auto failed = [this] { return state_->failed_in.load() == Ledger::Get().generation(); };
  if (state_ == nullptr || !failed()) return "";
  std::lock_guard<std::mutex> lock(state_->mutex);
  return failed() ? state_->first : "";
}

}  // namespace jax_overlap
