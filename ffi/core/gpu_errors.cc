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
  std::atomic<bool> failed{false};  // since the ledger was cleared in `generation`
  std::atomic<int> generation{0};

  std::mutex mutex;
  struct Entry {
    std::function<std::string(const Status&)> describe;
    int reported = -1;  // generation of the ledger in which it was
  };
  std::vector<Entry> entries;
  std::vector<size_t> free;
  std::string first;
  int looked = 0;  // generation of the ledger
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
  size_t index = state_->entries.size();
  if (!state_->free.empty()) {
    index = state_->free.back();
    state_->free.pop_back();
    state_->entries[index] = {std::move(describe)};
  } else if (index < kWords) {
    state_->entries.push_back({std::move(describe)});
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
  state_->entries[index] = {};
  state_->free.push_back(index);
}

void GpuErrors::Look() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const int generation = Ledger::Get().generation();
  if (state_->looked != generation) __atomic_store_n(stopped(), 0, __ATOMIC_RELEASE);
  state_->looked = generation;
  for (size_t i = 0; i < state_->entries.size(); ++i) {
    Status& word = state_->words[i].status;
    const int32_t failed = __atomic_load_n(&word.failed, __ATOMIC_ACQUIRE);
    if (failed == kNone) continue;
    Status status = word;
    status.failed = failed;
    // The next call on the channel, which is broken, says so again.
    __atomic_store_n(&word.failed, kNone, __ATOMIC_RELEASE);
    State::Entry& entry = state_->entries[i];
    if (!entry.describe || entry.reported == generation) continue;
    // What follows from an error that is known is no news.
    const bool known = state_->failed.load() && state_->generation.load() == generation;
    if (failed == kBroken && known) continue;
    entry.reported = generation;
    const std::string text = entry.describe(status);
    // At once, since nobody may ever read the result.
    std::fprintf(stderr, "jax_overlap: %s\n", text.c_str());
    std::fflush(stderr);
    Ledger::Get().Record(text);
    if (state_->first.empty() || state_->generation.load() != generation) state_->first = text;
    state_->generation.store(generation);
    state_->failed.store(true);
  }
}

std::string GpuErrors::Unacknowledged() {
  if (state_ == nullptr || !state_->failed.load()) return "";
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->generation.load() == Ledger::Get().generation()) return state_->first;
  state_->failed.store(false);
  return "";
}

}  // namespace jax_overlap
