#include "core/team.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <new>
#include <utility>

#include "core/schedule.h"

namespace jax_overlap {
namespace {

constexpr size_t kAlign = 4096;
// Epochs are the low 32 bits of sequence numbers. A channel starts over, cleared,
// long before they repeat.
constexpr uint64_t kRenewAfter = uint64_t{1} << 31;

std::atomic<size_t> g_heap_bytes{256 << 20};

}  // namespace

HostTeam::HostTeam(int ranks, int node_size, size_t heap_bytes)
    : ranks_(ranks), node_size_(node_size), heap_bytes_(RoundUp(heap_bytes, kAlign)) {
  // Address space only: pages cost memory when they are first written.
  void* base = mmap(nullptr, heap_bytes_ * ranks_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  base_ = base == MAP_FAILED ? nullptr : static_cast<char*>(base);
}

HostTeam::~HostTeam() {
  if (base_ != nullptr) munmap(base_, heap_bytes_ * ranks_);
}

std::unique_ptr<Channel> HostTeam::Take(const Channel::Key& key, size_t bytes, std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& free = free_[key];
  if (!free.empty()) {
    std::unique_ptr<Channel> channel = std::move(free.back());
    free.pop_back();
    if (*reinterpret_cast<uint64_t*>(channel->heaps[0]) > kRenewAfter) {
      for (char* heap : channel->heaps) std::memset(heap, 0, channel->bytes);
    }
    return channel;
  }
  const size_t rounded = RoundUp(bytes, kAlign);
  if (base_ == nullptr || rounded > heap_bytes_ - used_) {
    *error = "the symmetric heap is full: " + std::to_string(bytes) +
             " bytes a rank were asked for, " +
             std::to_string(base_ == nullptr ? 0 : heap_bytes_ - used_) + " of " +
             std::to_string(heap_bytes_) + " are free. Set JAX_OVERLAP_HEAP_BYTES to more";
    return nullptr;
  }
  auto channel = std::make_unique<Channel>();
  channel->key = key;
  channel->bytes = rounded;
  for (int r = 0; r < ranks_; ++r) channel->heaps.push_back(base_ + r * heap_bytes_ + used_);
  used_ += rounded;
  return channel;
}

void HostTeam::Give(std::unique_ptr<Channel> channel) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_[channel->key].push_back(std::move(channel));
}

std::shared_ptr<HostTeam> HostTeam::Of(const std::vector<int32_t>& devices, int node_size) {
  using Teams = std::map<std::pair<std::vector<int32_t>, int>, std::shared_ptr<HostTeam>>;
  static std::mutex* const mutex = new std::mutex;
  static Teams* const teams = new Teams;
  std::lock_guard<std::mutex> lock(*mutex);
  std::shared_ptr<HostTeam>& team = (*teams)[{devices, node_size}];
  if (team == nullptr) {
    team = std::make_shared<HostTeam>(static_cast<int>(devices.size()), node_size,
                                      g_heap_bytes.load());
  }
  return team;
}

void HostTeam::SetHeapBytes(size_t bytes) { g_heap_bytes = bytes; }

}  // namespace jax_overlap
