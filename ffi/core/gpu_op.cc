#include "core/gpu_op.h"

#include <algorithm>
#include <cstdio>

#include "core/gpu_errors.h"

namespace jax_overlap {

namespace ffi = xla::ffi;

std::string GpuSite::Init(std::string_view op, int64_t abi, std::string_view axes,
                          ffi::Span<const int64_t> groups, int64_t group_size, int64_t node_size,
                          bool puts, ffi::Span<const int64_t> devices) {
  what_ = std::string(op) + " over " + std::string(axes);
  const bool fits = group_size <= kMaxGpuRanks && groups.size() == devices.size();
  if (std::string error = CheckAttributes(what_, abi, groups.size(), group_size, node_size, fits);
      !error.empty()) {
    return error;
  }
  ranks_ = static_cast<int>(group_size);
  node_size_ = static_cast<int>(node_size);
  puts_ = puts;
  groups_.assign(groups.begin(), groups.end());
  devices_.assign(devices.begin(), devices.end());
  return "";
}

GpuSite::~GpuSite() { Drop(); }

void GpuSite::Drop() {
  for (auto& [ordinal, channel] : channels_) GpuErrors::Get().Give(channel.error);
  channels_.clear();
  if (pool_ != nullptr && !shared_) pool_->Leave(piece_);
  pool_ = nullptr;
}

std::string GpuSite::ChannelAt(int ordinal, const std::function<Need(size_t)>& need,
                               const GpuChannel** channel) {
  std::lock_guard<std::mutex> lock(mutex_);
  return At(ordinal, need, channel);
}

std::string GpuSite::ExchangeAt(int ordinal, const GpuChannel** channel, size_t* bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string error = At(ordinal, nullptr, channel);
  *bytes = piece_.bytes;
  return error;
}

std::string GpuSite::At(int ordinal, const std::function<Need(size_t)>& need,
                        const GpuChannel** channel) {
  if (pool_ == nullptr) {
    if (std::string error = Take(need); !error.empty()) return what_ + ": " + error;
  }
  const auto found = channels_.find(ordinal);
  if (found == channels_.end()) return NotOfMesh(ordinal);
  *channel = &found->second;
  return "";
}

std::string GpuSite::Take(const std::function<Need(size_t)>& need) {
  GpuWorld& world = GpuWorld::Get();
  std::lock_guard<std::mutex> lock(world.mutex());
  std::string error;
  GpuPool* const pool = world.PoolOf(devices_, &error);
  if (pool == nullptr) return error;
  if (error = world.MakeRoom(*pool); !error.empty()) return error;
  shared_ = need == nullptr;
  const bool is_short = !shared_ && pool->Budget() < pool->Share();
  const size_t of_share = is_short ? need(pool->Share()).bytes : 0;
  const Need needed = shared_ ? Need{0, 0} : need(pool->Budget());
  const std::string starved = is_short ? pool->Starved(needed.bytes, of_share) : "";
  if (!starved.empty()) std::fprintf(stderr, "%s: %s\n", what_.c_str(), starved.c_str());
  error = shared_ ? pool->TakeExchange({groups_, ranks_, node_size_}, &piece_)
                  : pool->Take(needed.bytes, &piece_);
  if (!error.empty()) return error;
  pool_ = pool;
  const uint64_t descriptor = Descriptor(shared_ ? 0 : CallOf(needed.hash));
  for (const auto& [ordinal, index] : LocalIndices()) {
    error = MakeChannel(index, descriptor, &channels_[ordinal]);
    if (error.empty()) continue;
    channels_.erase(ordinal);
    Drop();
    return error;
  }
  return "";
}

std::map<int, int64_t> GpuSite::LocalIndices() const {
  std::map<int, int64_t> indices;
  for (const auto& [ordinal, id] : GpuWorld::Get().local()) {
    const auto device = std::find(devices_.begin(), devices_.end(), id);
    const auto at = std::find(groups_.begin(), groups_.end(), device - devices_.begin());
    // Nor is it there if there is no such device.
    if (at != groups_.end()) indices[ordinal] = at - groups_.begin();
  }
  return indices;
}

std::map<int, int> GpuSite::LocalRanks() const {
  std::map<int, int> ranks;
  for (const auto& [ordinal, index] : LocalIndices()) ranks[ordinal] = index % ranks_;
  return ranks;
}

std::string GpuSite::NotOfMesh(int ordinal) const {
  return what_ + ": device " + std::to_string(ordinal) +
         " of this process is not of the mesh that the program was compiled for";
}

uint64_t GpuSite::CallOf(uint64_t hash) const {
  hash = Mixed(kHashSeed, hash);
  for (const char c : what_) hash = Mixed(hash, static_cast<unsigned char>(c));
  return hash;
}

uint64_t GpuSite::Descriptor(uint64_t hash) const {
  for (const int64_t place : groups_) hash = Mixed(hash, place);
  for (const uint64_t word : {static_cast<uint64_t>(ranks_), static_cast<uint64_t>(node_size_),
                              static_cast<uint64_t>(puts_), static_cast<uint64_t>(piece_.index),
                              piece_.offset, piece_.bytes}) {
    hash = Mixed(hash, word);
  }
  return hash | 1;
}

std::string GpuSite::MakeChannel(int64_t index, uint64_t descriptor, GpuChannel* channel) {
  const int64_t* const group = groups_.data() + index / ranks_ * ranks_;
  const GpuRegion& region = pool_->region();
  channel->shape = {static_cast<int>(index % ranks_), ranks_, node_size_};
  for (int r = 0; r < ranks_; ++r) {
    const int64_t peer = group[r];
    const bool put = puts_ && r / node_size_ != channel->shape.node();
    char* const base = (put ? region.symmetric : region.bases)[peer];
    if (base == nullptr) {
      return "stores do not reach device " + std::to_string(devices_[peer]) +
             ", as they did when the program was compiled: compile it anew";
    }
    channel->heaps[r] = base + piece_.offset;
    channel->pes[r] = put ? region.processes[peer] : -1;
  }
  channel->own = channel->heaps[channel->shape.rank];
  channel->directory = static_cast<int64_t>(piece_.offset - pool_->DirectoryOffset(piece_.index));
  channel->descriptor = descriptor;
  channel->limit_ns = GpuWorld::Get().limit_ns();
  channel->stopped = GpuErrors::Get().stopped();
  channel->error =
      GpuErrors::Get().Take([this, group](const Status& s) { return Describe(group, s); });
  if (channel->error == nullptr) {
    return "too many call sites are alive: each has a word for errors on each device of the "
           "process, and there are " +
           std::to_string(GpuErrors::kWords);
  }
  return "";
}

std::string GpuSite::Describe(const int64_t* group, const Status& status) const {
  const auto name = [&](int rank) {
    if (rank < 0 || rank >= ranks_) return std::string("an unknown rank");
    const int64_t place = group[rank];
    return "rank " + std::to_string(rank) + " (device " + std::to_string(devices_[place]) +
           " of process " + std::to_string(pool_->region().processes[place]) + ")";
  };
  const std::string me = what_ + ": " + name(status.rank);
  const std::string invalid = " The result is not valid (NaN, or the smallest integer). ";
  if (status.failed == kBroken) {
    return me + " made a call that cannot be served, since an earlier one has failed." + invalid +
           "Start the program anew";
  }
  if (status.failed == kPeerFailed) {
    return me + " has something from " + name(status.peer) + ", which has failed." + invalid +
           "Its own error says why; start the program anew";
  }
  if (status.failed == kConcurrent) {
    return me + " was called while another fused matmul was under way on this device." + invalid +
           "One has to follow the other, as they share slots: do not let XLA run them at once";
  }
  if (status.failed == kMismatch) {
    return me + " and " + name(status.peer) +
           " make different calls, a mismatch: another op, shape, dtype or algorithm, or the same "
           "calls in another order (step " +
           std::to_string(status.step) + ": " + std::to_string(status.expected) + " here, " +
           std::to_string(status.seen) + " there)." + invalid +
           "All processes have to run the same programs in the same order";
  }
  char limit[32];
  std::snprintf(limit, sizeof(limit), "%g", GpuWorld::Get().limit_s());
  const std::string where =
      status.step == GpuChannel::kMeeting
          ? ", which has not made this call yet (the first one also waits for it to compile)."
          : " in step " + std::to_string(status.step) + ": expected sequence number " +
                std::to_string(status.expected) + ", last seen " + std::to_string(status.seen) +
                ".";
  return me + " waited " + limit + " s in vain for " + name(status.peer) + where + invalid +
         "That rank has ended, is stuck, or does not make this call: all ranks have to. "
         "JAX_OVERLAP_WAIT_TIMEOUT_S sets the limit";
}

std::string UnacknowledgedOnGpu() {
  const std::string text = GpuErrors::Get().Unacknowledged();
  if (text.empty()) return "";
  return "An earlier call has failed: " + text +
         " (jax_overlap.clear_errors() acknowledges errors.)";
}

}  // namespace jax_overlap
