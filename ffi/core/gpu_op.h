// What the GPU handlers of all ops share: the call site, its channel, and the text of its
// errors.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/gpu_channel.h"
#include "core/gpu_team.h"
#include "core/handler.h"
#include "core/hash.h"
#include "core/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_overlap {

// What all calls of one HLO instruction have in common. XLA makes one for each instruction
// of an executable; the devices of a process share it.
class GpuSite {
 public:
  ~GpuSite();

  // `groups` holds places in the mesh, group by group; a place's index in its group is its
  // rank. `puts`: ranks of other nodes are put to, not stored to. `devices` has the global
  // id of the device at each place. An error text for attributes that make no sense.
  std::string Init(std::string_view op, int64_t abi, std::string_view axes,
                   xla::ffi::Span<const int64_t> groups, int64_t group_size, int64_t node_size,
                   bool puts, xla::ffi::Span<const int64_t> devices);

  int ranks() const { return ranks_; }
  int node_size() const { return node_size_; }
  // Names the op and its axes, for errors.
  const std::string& what() const { return what_; }
  TeamShape shape() const { return {0, ranks_, node_size_}; }
  bool puts() const { return puts_; }
  // The devices of this process that take part: rank by ordinal.
  std::map<int, int> LocalRanks() const;
  // The text of an error about one that does not.
  std::string NotOfMesh(int ordinal) const;

  // The bytes of a channel, and a number that is the same for calls alike only.
  struct Need {
    size_t bytes;
    uint64_t hash;
  };
  // The channel as the device `ordinal` of this process sees it. It is taken by the first
  // call: `need(what it may take)` says how large. An error text if there is none.
  std::string ChannelAt(int ordinal, const std::function<Need(size_t)>& need,
                        const GpuChannel** channel);
  // The same of the channel that all sites of the groups share (core/exchange.h), and how
  // large it is. A site has one or the other.
  std::string ExchangeAt(int ordinal, const GpuChannel** channel, size_t* bytes);
  // What is the same on all ranks, if they make the same call, of which `hash` says the rest.
  uint64_t CallOf(uint64_t hash) const;

 private:
  // `need` null: the shared one.
  std::string At(int ordinal, const std::function<Need(size_t)>& need, const GpuChannel** channel);
  std::string Take(const std::function<Need(size_t)>& need);
  // The same as indices of `groups_`.
  std::map<int, int64_t> LocalIndices() const;
  void Drop();
  // What all ranks take a channel of their own, or the shared one, for.
  uint64_t Descriptor(uint64_t hash) const;
  // That of `groups_[index]`.
  std::string MakeChannel(int64_t index, uint64_t descriptor, GpuChannel* channel);
  // `group`: the places of the ranks.
  std::string Describe(const int64_t* group, const Status& status) const;

  std::string what_;
  int ranks_ = 0;
  int node_size_ = 0;
  std::vector<int64_t> groups_;
  std::vector<int64_t> devices_;
  GpuPool* pool_ = nullptr;  // once the channel is taken
  GpuPool::Piece piece_ = {};
  bool puts_ = false;
  bool shared_ = false;  // the channel

  std::mutex mutex_;
  std::map<int, GpuChannel> channels_;  // by ordinal
};

// The text of an earlier error that nobody has acknowledged, which fails an execution; or
// an empty one.
std::string UnacknowledgedOnGpu();

}  // namespace jax_overlap
