#include "core/gpu_op.h"

#include <algorithm>
#include <cstdio>

#include "core/abi.h"
#include "core/gpu_errors.h"

namespace jax_overlap {

namespace ffi = xla::ffi;

std::string GpuSite::Init(std::string_view op, int64_t abi, std::string_view axes,
                          ffi::Span<const int64_t> groups, int64_t group_size, int64_t node_size,
                          bool puts, ffi::Span<const int64_t> devices) {
  what_ = std::string(op) + " over " + std::string(axes);
  const bool sound = abi == kAbi && group_size >= 1 && group_size <= kMaxGpuRanks &&
                     node_size >= 1 && groups.size() % group_size == 0 &&
                     group_size % node_size == 0 && groups.size() == devices.size();
  if (!sound) {
    return what_ +
           ": bad attributes. This program was made for another version of "
           "jax_overlap: compile it anew";
  }
  ranks_ = static_cast<int>(group_size);
  node_size_ = static_cast<int>(node_size);
  puts_ = puts;
  groups_.assign(groups.begin(), groups.end());
  devices_.assign(devices.begin(), devices.end());
  return "";
}

GpuSite::~GpuSite() {
  for (auto& [ordinal, channel] : channels_) GpuErrors::Get().Give(channel.error);
  if (pool_ == nullptr) return;
  std::lock_guard<std::mutex> lock(GpuWorld::Get().mutex());
  pool_->Leave(piece_);
}

std::string GpuSite::ChannelAt(int ordinal, const std::function<Need(size_t)>& need,
                               const GpuChannel** channel) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (channels_.empty()) {
    if (std::string error = Take(need); !error.empty()) return what_ + ": " + error;
  }
  const auto found = channels_.find(ordinal);
  if (found == channels_.end()) {
    return what_ + ": device " + std::to_string(ordinal) +
           " of this process is not of the mesh that the program was compiled for";
  }
  *channel = &found->second;
  return "";
}

std::string GpuSite::Take(const std::function<Need(size_t)>& need) {
  GpuWorld& world = GpuWorld::Get();
  std::lock_guard<std::mutex> lock(world.mutex());
  std::string error;
  GpuPool* const pool = world.PoolOf(devices_, &error);
  if (pool == nullptr) return error;
  const Need needed = need(pool->Budget());
  GpuPool::Piece& piece = piece_;
  if (error = world.Take(*pool, needed.bytes, &piece); !error.empty()) return error;
  pool_ = pool;

  uint64_t hash = Mixed(0xcbf29ce484222325ull, needed.hash);
  for (const char c : what_) hash = Mixed(hash, static_cast<unsigned char>(c));
  for (const int64_t place : groups_) hash = Mixed(hash, place);
  for (const uint64_t word : {static_cast<uint64_t>(ranks_), static_cast<uint64_t>(node_size_),
                              static_cast<uint64_t>(puts_), static_cast<uint64_t>(piece.index),
                              piece.offset, piece.bytes}) {
    hash = Mixed(hash, word);
  }
  for (const auto& [ordinal, id] : world.local()) {
    const auto device = std::find(devices_.begin(), devices_.end(), id);
    if (device == devices_.end()) continue;
    const int64_t place = device - devices_.begin();
    const auto at = std::find(groups_.begin(), groups_.end(), place);
    if (at == groups_.end()) continue;
    const int64_t index = at - groups_.begin();
    const int64_t* const group = groups_.data() + index / ranks_ * ranks_;

    GpuChannel channel = {};
    channel.shape = {static_cast<int>(index % ranks_), ranks_, node_size_};
    for (int r = 0; r < ranks_; ++r) {
      const int64_t peer = group[r];
      const bool put = puts_ && r / node_size_ != channel.shape.node();
      char* const base = (put ? pool->region().symmetric : pool->region().bases)[peer];
      channel.pes[r] = put ? pool->region().processes[peer] : -1;
      if (base == nullptr) {
        return "stores do not reach device " + std::to_string(devices_[peer]) +
               ", as they did when the program was compiled: compile it anew";
      }
      channel.heaps[r] = base + piece.offset;
    }
    channel.own = channel.heaps[channel.shape.rank];
    channel.directory = static_cast<int64_t>(piece.offset - pool->DirectoryOffset(piece.index));
    channel.descriptor = hash | 1;
    channel.limit_ns = world.limit_ns();
    GpuChannel& kept = channels_[ordinal] = channel;
    kept.error =
        GpuErrors::Get().Take([this, group](const Status& s) { return Describe(group, s); });
    if (kept.error == nullptr) {
      channels_.clear();
      return "too many call sites are alive: " + std::to_string(GpuErrors::kWords);
    }
  }
  return "";
}

std::string GpuSite::Describe(const int64_t* group, const Status& status) const {
  const auto name = [&](int rank) {
    const int64_t place = group[rank];
    return "rank " + std::to_string(rank) + " (device " + std::to_string(devices_[place]) +
           " of process " + std::to_string(pool_->region().processes[place]) + ")";
  };
  const std::string me = what_ + ": " + name(status.rank);
  if (status.failed == kBroken) {
    return me +
           " made a call that cannot be served, since an earlier one has failed there. Its result "
           "is not valid (NaN). Start the program anew";
  }
  if (status.failed == kMismatch) {
    return me + " and " + name(status.peer) +
           " make different calls, a mismatch: another op, shape, dtype or algorithm, or the same "
           "calls in another order. The result is not valid (NaN). All processes have to run the "
           "same programs in the same order";
  }
  char limit[32];
  std::snprintf(limit, sizeof(limit), "%g", GpuWorld::Get().limit_s());
  return me + " waited " + limit + " s in vain for " + name(status.peer) +
         (status.step == GpuChannel::kMeeting
              ? ", which has not made this call yet"
              : " in step " + std::to_string(status.step) + ": expected sequence number " +
                    std::to_string(status.expected) + ", last seen " +
                    std::to_string(status.seen)) +
         ". The result is not valid (NaN). That rank has ended, is stuck, or does not make this "
         "call: all ranks have to. JAX_OVERLAP_WAIT_TIMEOUT_S sets the limit";
}

ffi::Error InitializeOnGpu() {
  const std::string text = GpuErrors::Get().Unacknowledged();
  if (text.empty()) return ffi::Error::Success();
  return ffi::Error(
      ffi::ErrorCode::kInternal,
      "An earlier call has failed: " + text + " (jax_overlap.clear_errors() acknowledges errors.)");
}

}  // namespace jax_overlap
