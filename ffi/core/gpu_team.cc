#include "core/gpu_team.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/gpu_memory.h"
#include "core/schedule.h"

namespace jax_overlap {
namespace {

constexpr size_t kAlign = 256;
// A channel may take this share of a pool, or, where little more than a quarter is left, or less,
// this one of what is left. Channels are a little more than a power of two, and pools are one.
constexpr size_t kShare = 120;
constexpr size_t kShareOfLittle = 32;
// A call with this part of what it would take is slow.
constexpr size_t kStarved = 4;

}  // namespace

GpuPool::GpuPool(std::vector<int64_t> devices, GpuRegion region)
    : devices_(std::move(devices)), region_(std::move(region)) {
  const size_t directory = RoundUp(kMaxChannels * DirectoryBytes(), kAlign);
  free_bytes_ = region_.bytes - Min(region_.bytes, directory);
  if (free_bytes_ > 0) free_[directory] = free_bytes_;
  reclaim_below_ = free_bytes_ / 2;
  for (int i = 0; i < kMaxChannels; ++i) free_indices_.insert(i);
}

size_t GpuPool::Share() const { return region_.bytes / kShare; }
size_t GpuPool::Budget() const { return Min(Share(), free_bytes_ / kShareOfLittle); }

std::string GpuPool::Starved(size_t bytes, size_t of_share) {
  if (told_starved_ || bytes * kStarved > of_share) return "";
  told_starved_ = true;
  return std::to_string(free_bytes_) + " of " + std::to_string(region_.bytes) +
         " bytes of the symmetric heap for these devices are free, so this call takes " +
         std::to_string(bytes) + " instead of " + std::to_string(of_share) +
         " and goes in many small pieces, which is slow; calls after it, too. Set "
         "JAX_OVERLAP_HEAP_BYTES to more, in all processes, or put repeated layers into "
         "jax.lax.scan";
}

std::string GpuPool::Take(size_t bytes, Piece* piece) {
  if (free_indices_.empty()) {
    return "there are " + std::to_string(kMaxChannels) +
           " call sites over these devices, which is as many as there can be. Put repeated layers "
           "into jax.lax.scan";
  }
  bytes = RoundUp(bytes, kAlign);
  const auto range = std::find_if(free_.begin(), free_.end(),
                                  [&](const auto& range) { return range.second >= bytes; });
  if (range == free_.end()) {
    return "the symmetric heap is full: " + std::to_string(bytes) +
           " bytes a rank were asked for, " + std::to_string(free_bytes_) + " of the " +
           std::to_string(region_.bytes) +
           " for these devices are free. Set JAX_OVERLAP_HEAP_BYTES to more, in all processes";
  }
  const auto [offset, room] = *range;
  free_.erase(range);
  if (room > bytes) free_[offset + bytes] = room - bytes;
  free_bytes_ -= bytes;
  *piece = {*free_indices_.begin(), offset, bytes};
  free_indices_.erase(free_indices_.begin());
  return "";
}

std::string GpuPool::TakeExchange(const Teams& teams, Piece* piece) {
  const auto found = exchanges_.find(teams);
  if (found == exchanges_.end()) {
    size_t largest = 0;
    for (const auto& [offset, bytes] : free_) largest = std::max(largest, bytes);
    if (std::string error = Take(Min(largest, free_bytes_ / 2 / kAlign * kAlign), piece);
        !error.empty()) {
      return error;
    }
    reclaim_below_ = free_bytes_ / 2;  // it will not come back
    exchanges_[teams] = *piece;
  } else {
    *piece = found->second;
  }
  return "";
}

void GpuPool::Leave(const Piece& piece) {
  std::lock_guard<std::mutex> lock(left_mutex_);
  left_.push_back(piece);
}

std::vector<GpuPool::Piece> GpuPool::left() {
  std::lock_guard<std::mutex> lock(left_mutex_);
  return left_;
}

void GpuPool::Reclaim(const std::vector<int>& indices) {
  std::lock_guard<std::mutex> lock(left_mutex_);
  for (const int index : indices) {
    const auto found = std::find_if(left_.begin(), left_.end(),
                                    [&](const Piece& piece) { return piece.index == index; });
    if (found == left_.end()) continue;
    auto at = free_.emplace(found->offset, found->bytes).first;
    const auto next = std::next(at);
    if (next != free_.end() && at->first + at->second == next->first) {
      at->second += next->second;
      free_.erase(next);
    }
    if (at != free_.begin()) {
      const auto before = std::prev(at);
      if (before->first + before->second == at->first) {
        before->second += at->second;
        free_.erase(at);
      }
    }
    free_bytes_ += found->bytes;
    free_indices_.insert(index);
    left_.erase(found);
  }
  reclaim_below_ = free_bytes_ / 2;
}

GpuWorld& GpuWorld::Get() {
  static GpuWorld* const world = new GpuWorld;
  return *world;
}

void GpuWorld::Configure(Setup setup) {
  std::lock_guard<std::mutex> lock(mutex_);
  setup_ = std::move(setup);
}

GpuPool* GpuWorld::PoolOf(const std::vector<int64_t>& devices, std::string* error) {
  std::unique_ptr<GpuPool>& pool = pools_[devices];
  if (pool != nullptr) return pool.get();
  if (!setup_.make_region) {
    *error = "the GPUs are not set up: call jax_overlap.init() first, in all processes";
    return nullptr;
  }
  try {
    pool = std::make_unique<GpuPool>(devices, setup_.make_region(devices));
  } catch (const std::exception& e) {
    *error = e.what();
  }
  return pool.get();
}

std::string GpuWorld::MakeRoom(GpuPool& pool) {
  if (!pool.short_of_room()) return "";
  const std::vector<GpuPool::Piece> left = pool.left();
  std::vector<int> indices;
  for (const GpuPool::Piece& piece : left) indices.push_back(piece.index);
  try {
    indices = setup_.agree(pool.devices(), indices);
    // Whoever takes a piece next finds it as it was in the beginning: no old sequence numbers.
    for (const auto& [ordinal, id] : setup_.local) {
      const auto& devices = pool.devices();
      const auto device = std::find(devices.begin(), devices.end(), id);
      if (device == devices.end()) continue;
      char* const base = pool.region().bases[device - devices.begin()];
      std::vector<std::pair<char*, size_t>> ranges;
      for (const GpuPool::Piece& piece : left) {
        if (std::count(indices.begin(), indices.end(), piece.index) == 0) continue;
        ranges.emplace_back(base + piece.offset, piece.bytes);
        ranges.emplace_back(base + pool.DirectoryOffset(piece.index), pool.DirectoryBytes());
      }
      if (std::string error = ClearMemory(ordinal, ranges); !error.empty()) return error;
    }
    setup_.agree(pool.devices(), {});  // all have cleared theirs
  } catch (const std::exception& e) {
    return e.what();
  }
  pool.Reclaim(indices);
  return "";
}

}  // namespace jax_overlap
