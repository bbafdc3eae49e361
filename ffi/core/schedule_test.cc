#include "core/schedule.h"

#include <set>
#include <vector>

#include "core/testing.h"

namespace jax_overlap {
namespace {

void SlicesCoverEverythingOnce() {
  for (size_t n : {0, 1, 7, 16, 17, 255, 256, 4097}) {
    for (int parts = 1; parts <= 9; ++parts) {
      for (size_t align : {1, 16, 64}) {
        size_t next = 0;
        for (int i = 0; i < parts; ++i) {
          const Slice slice = SliceOf(n, parts, i, align);
          JO_CHECK(slice.begin == next && slice.end >= slice.begin);
          JO_CHECK(slice.begin % align == 0 || slice.begin == n);
          JO_CHECK(slice.size() <= MaxSlice(n, parts, align));
          next = slice.end;
        }
        JO_CHECK(next == n);
      }
    }
  }
}

void RotationServesEveryPeerOnceAndSpreadsThem() {
  for (int size = 1; size <= 9; ++size) {
    for (int k = 1; k < size; ++k) {
      std::set<int> served;
      for (int rank = 0; rank < size; ++rank) {
        JO_CHECK(Rotated(rank, k, size) != rank);
        served.insert(Rotated(rank, k, size));
      }
      JO_CHECK(served.size() == static_cast<size_t>(size));
    }
  }
}

// Runs the exchanges on sets of nodes instead of numbers: in the end every node
// must hold every node's share exactly once, in the order that all agree on.
void DoublingReachesEveryNodeForAnyCount() {
  for (int nodes = 1; nodes <= 33; ++nodes) {
    const Doubling doubling{nodes};
    JO_CHECK(doubling.power() <= nodes && 2 * doubling.power() > nodes);
    JO_CHECK(1 << doubling.steps() == doubling.power());
    std::vector<std::vector<int>> sum(nodes);
    for (int node = 0; node < nodes; ++node) sum[node] = {node};
    const auto joined = [](std::vector<int> low, const std::vector<int>& high) {
      low.insert(low.end(), high.begin(), high.end());
      return low;
    };
    for (int node = 0; node < nodes; ++node) {
      if (!doubling.folded(node)) continue;
      const int host = doubling.fold_partner(node);
      JO_CHECK(doubling.hosts(host) && doubling.fold_partner(host) == node);
      sum[host] = joined(sum[host], sum[node]);
    }
    for (int step = 0; step < doubling.steps(); ++step) {
      const auto before = sum;
      for (int node = 0; node < doubling.power(); ++node) {
        const int partner = Doubling::partner(node, step);
        JO_CHECK(partner < doubling.power() && Doubling::partner(partner, step) == node);
        sum[node] = node < partner ? joined(before[node], before[partner])
                                   : joined(before[partner], before[node]);
      }
    }
    for (int node = doubling.power(); node < nodes; ++node) {
      sum[node] = sum[doubling.fold_partner(node)];
    }
    for (int node = 0; node < nodes; ++node) {
      JO_CHECK(sum[node] == sum[0]);
      JO_CHECK(std::set<int>(sum[node].begin(), sum[node].end()).size() ==
               static_cast<size_t>(nodes));
      JO_CHECK(sum[node].size() == static_cast<size_t>(nodes));
    }
  }
}

}  // namespace
}  // namespace jax_overlap

int main() {
  jax_overlap::SlicesCoverEverythingOnce();
  jax_overlap::RotationServesEveryPeerOnceAndSpreadsThem();
  jax_overlap::DoublingReachesEveryNodeForAnyCount();
  std::puts("schedule_test: 3 passed, 0 failed");
}
