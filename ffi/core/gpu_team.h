// Teams on GPUs: the symmetric memory of the devices of a mesh, and the channels in it.
//
// A pool is a region of the symmetric heap of each device of a mesh, in the order of the
// mesh. All programs over the same devices share it, and carve their channels from it when
// they first run: that is the same order everywhere, as processes of one program run the
// same things in the same order, while they need not compile the same. A channel is at the
// same offset in the pool of each rank; whether they agree the first call finds out
// (core/gpu_channel.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/gpu_channel.h"

namespace jax_overlap {

struct GpuRegion {
  std::vector<char*> bases;        // of each device, as mapped here; null: stores do not reach it
  std::vector<char*> symmetric;    // the same places in the own heap
  std::vector<int32_t> processes;  // of each device
  size_t bytes = 0;                // of each, zeroed
};

class GpuPool {
 public:
  GpuPool(std::vector<int64_t> devices, GpuRegion region);

  const std::vector<int64_t>& devices() const { return devices_; }
  const GpuRegion& region() const { return region_; }

  struct Piece {
    int index;  // in the directory
    size_t offset;
    size_t bytes;
  };
  // An error text if there is no room.
  std::string Take(size_t bytes, Piece* piece);
  // What a channel may take: a small share, so that there is room for many. Less of what is
  // left once that is little.
  size_t Share() const;
  size_t Budget() const;
  // What to say, once, when a channel gets so much less than of a whole share that its calls
  // become slow; else empty.
  std::string Starved(size_t bytes, size_t of_share);

  // The piece that all call sites of these teams share, for large slots: half of what is
  // free when the first of them asks. It is kept. `groups` holds places, group by group.
  struct Teams {
    std::vector<int64_t> groups;
    int ranks, node_size;
    bool operator<(const Teams& other) const {
      return std::tie(ranks, node_size, groups) <
             std::tie(other.ranks, other.node_size, other.groups);
    }
  };
  std::string TakeExchange(const Teams& teams, Piece* piece);

  // What programs that are gone have left. Other ranks may still have theirs: a piece is
  // free once all have let go of it, which they agree upon when room gets short. Python ends
  // programs with the GIL held, so Leave has a lock of its own, that of nobody who waits.
  void Leave(const Piece& piece);
  bool short_of_room() const { return free_bytes_ < reclaim_below_; }
  std::vector<Piece> left();
  // These of them are free, and cleared, everywhere.
  void Reclaim(const std::vector<int>& indices);

  // The words of the directory for a channel.
  size_t DirectoryOffset(int index) const { return index * DirectoryBytes(); }
  size_t DirectoryBytes() const { return devices_.size() * sizeof(uint64_t); }

  static constexpr int kMaxChannels = 4096;

 private:
  const std::vector<int64_t> devices_;
  const GpuRegion region_;
  // The same on all ranks, which take and reclaim alike.
  std::map<size_t, size_t> free_;  // offset -> bytes
  size_t free_bytes_;
  std::set<int> free_indices_;
  size_t reclaim_below_;
  bool told_starved_ = false;
  std::map<Teams, Piece> exchanges_;
  // A rank's own.
  std::mutex left_mutex_;
  std::vector<Piece> left_;
};

// What this process has of GPUs; set up by Python.
class GpuWorld {
 public:
  static GpuWorld& Get();

  struct Setup {
    std::map<int, int64_t> local;  // global ids of this process's devices, by ordinal
    // The region of a pool, and the indices that all processes of a pool name. Both may
    // wait for other processes, and throw if that is in vain.
    std::function<GpuRegion(const std::vector<int64_t>& devices)> make_region;
    std::function<std::vector<int>(const std::vector<int64_t>& devices, std::vector<int>)> agree;
    double wait_timeout_s;
    int max_blocks;  // of a kernel that waits
  };
  void Configure(Setup setup);

  const std::map<int, int64_t>& local() const { return setup_.local; }
  double limit_s() const { return setup_.wait_timeout_s; }
  uint64_t limit_ns() const { return static_cast<uint64_t>(limit_s() * 1e9); }
  int max_blocks() const { return setup_.max_blocks; }

  // Held by who calls the following.
  std::mutex& mutex() { return mutex_; }
  // The pool of these devices, made at its first use; null, with `error` set, if that fails.
  GpuPool* PoolOf(const std::vector<int64_t>& devices, std::string* error);
  // Gets back what programs have left, if the pool is short of room.
  std::string MakeRoom(GpuPool& pool);

 private:
  std::mutex mutex_;
  Setup setup_ = {};
  std::map<std::vector<int64_t>, std::unique_ptr<GpuPool>> pools_;
};

}  // namespace jax_overlap
