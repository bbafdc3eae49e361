// A team on the CPU: the ranks of one mesh axis (or axes), their symmetric heap,
// and the channels carved from it.
//
// A channel is memory at the same offset in every rank's heap, laid out by an
// algorithm, that starts with a sequence number and is never cleared: each use
// continues the numbers of the last. On the CPU all ranks of a call have arrived
// before any of them runs, so a call takes a channel for itself and gives it back
// at its end; which channel it is needs no agreement.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace jax_overlap {

struct Channel {
  // What must be equal for the contents to make sense: algorithm, element type
  // and elements in a chunk.
  using Key = std::tuple<int, int, size_t>;

  Key key;
  size_t bytes = 0;          // of each rank
  std::vector<char*> heaps;  // where it starts, a rank
};

class HostTeam {
 public:
  // `nodes` of equal size, ranks numbered node by node.
  HostTeam(int ranks, int node_size, size_t heap_bytes);
  ~HostTeam();
  HostTeam(const HostTeam&) = delete;
  HostTeam& operator=(const HostTeam&) = delete;

  int ranks() const { return ranks_; }
  int node_size() const { return node_size_; }

  // A channel of this kind for exclusive use; null, with `error` set, when the
  // heap has no room for another.
  std::unique_ptr<Channel> Take(const Channel::Key& key, size_t bytes, std::string* error);
  void Give(std::unique_ptr<Channel> channel);

  // The team of these devices (logical ids in rank order), made at its first use
  // and kept: all executables share it.
  static std::shared_ptr<HostTeam> Of(const std::vector<int32_t>& devices, int node_size);
  static void SetHeapBytes(size_t bytes);

 private:
  const int ranks_;
  const int node_size_;
  const size_t heap_bytes_;
  char* base_;

  std::mutex mutex_;
  size_t used_ = 0;
  std::map<Channel::Key, std::vector<std::unique_ptr<Channel>>> free_;
};

}  // namespace jax_overlap
