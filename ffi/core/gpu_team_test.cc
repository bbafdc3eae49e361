// Pools of symmetric memory: what fits, and what comes back. No GPU is needed: memory is
// only counted here, and what is to be cleared is noted.
#include "core/gpu_team.h"

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/gpu_memory.h"
#include "core/testing.h"

namespace jax_overlap {
namespace {

std::vector<std::pair<char*, size_t>> cleared;

}  // namespace

std::string ClearMemory(int, const std::vector<std::pair<char*, size_t>>& ranges) {
  cleared.insert(cleared.end(), ranges.begin(), ranges.end());
  return "";
}

namespace {

constexpr size_t kPart = 512 << 20;  // of a mesh, of the default heap

GpuRegion Region(size_t ranks, size_t bytes) {
  GpuRegion region;
  for (size_t r = 0; r < ranks; ++r) {
    region.bases.push_back(reinterpret_cast<char*>((r + 1) << 40));
    region.processes.push_back(static_cast<int32_t>(r));
  }
  region.symmetric = region.bases;
  region.bytes = bytes;
  return region;
}

std::unique_ptr<GpuPool> MakePool(size_t bytes = kPart) {
  return std::make_unique<GpuPool>(std::vector<int64_t>{0, 1, 2, 3}, Region(4, bytes));
}

// 80 layers with two call sites each, as large as they may be.
void TestManyCallSitesFitTheDefaultHeap() {
  const auto made = MakePool();
  GpuPool& pool = *made;
  JO_CHECK(pool.Budget() == kPart / 120);
  for (int site = 0; site < 160; ++site) {
    GpuPool::Piece piece;
    JO_CHECK(pool.Budget() > 128 << 10);
    JO_CHECK(pool.Take(pool.Budget(), &piece).empty());
    JO_CHECK(piece.index == site);
  }
}

// Who gets much less than a share is told, once.
void TestALittleIsTold() {
  const auto made = MakePool();
  GpuPool& pool = *made;
  JO_CHECK(pool.Budget() == pool.Share());
  int sites = 0;
  while (4 * pool.Budget() > pool.Share()) {
    GpuPool::Piece piece;
    JO_CHECK(pool.Starved(pool.Budget(), pool.Share()).empty());
    JO_CHECK(pool.Take(pool.Budget(), &piece).empty());
    ++sites;
  }
  JO_CHECK(sites > 120);
  JO_CHECK(pool.Starved(1000, 3999).empty());
  const std::string told = pool.Starved(1000, 4000);
  JO_CHECK(told.find("takes 1000 instead of 4000") != std::string::npos);
  JO_CHECK(told.find("Set JAX_OVERLAP_HEAP_BYTES") != std::string::npos);
  JO_CHECK(pool.Starved(1000, 4000).empty());
}

void TestPiecesDoNotOverlapAndAreReused() {
  const auto made = MakePool(4 << 20);
  GpuPool& pool = *made;
  std::vector<GpuPool::Piece> pieces(3);
  for (GpuPool::Piece& piece : pieces) JO_CHECK(pool.Take(1000, &piece).empty());
  const size_t directory = GpuPool::kMaxChannels * pool.DirectoryBytes();
  JO_CHECK(pieces[0].offset >= directory);
  JO_CHECK(pieces[1].offset == pieces[0].offset + pieces[0].bytes);
  // What is left is not free before all have agreed.
  pool.Leave(pieces[1]);
  pool.Leave(pieces[0]);
  GpuPool::Piece next;
  JO_CHECK(pool.Take(1000, &next).empty());
  JO_CHECK(next.offset > pieces[2].offset && next.index == 3);
  pool.Reclaim({0, 1, 77});
  JO_CHECK(pool.left().empty());
  // Two neighbours are one again.
  JO_CHECK(pool.Take(pieces[0].bytes + pieces[1].bytes, &next).empty());
  JO_CHECK(next.offset == pieces[0].offset && next.index == 0);
}

void TestFull() {
  const auto made = MakePool(1 << 20);
  GpuPool& pool = *made;
  GpuPool::Piece piece;
  const std::string error = pool.Take(2 << 20, &piece);
  JO_CHECK(error.find("2097152 bytes") != std::string::npos);
  JO_CHECK(error.find("JAX_OVERLAP_HEAP_BYTES") != std::string::npos);
  JO_CHECK(!GpuPool({0, 1}, Region(2, 100)).Take(8, &piece).empty());
}

void TestTooManyCallSites() {
  const auto made = MakePool();
  GpuPool& pool = *made;
  GpuPool::Piece piece;
  for (int i = 0; i < GpuPool::kMaxChannels; ++i) JO_CHECK(pool.Take(64, &piece).empty());
  JO_CHECK(pool.Take(64, &piece).find("4096") != std::string::npos);
}

// Other processes have not let go of everything yet.
void TestWorldReclaimsWhatAllHaveLeft() {
  std::vector<std::vector<int>> asked;
  GpuWorld world;
  world.Configure(
      {{{0, 2}},
       [](const std::vector<int64_t>& devices) { return Region(devices.size(), 4 << 20); },
       [&](const std::vector<int64_t>&, std::vector<int> indices) {
         asked.push_back(indices);
         if (!indices.empty()) indices.pop_back();
         return indices;
       },
       1.5,
       32});
  std::string error;
  GpuPool* const pool = world.PoolOf({0, 1, 2, 3}, &error);
  JO_CHECK(pool != nullptr && world.PoolOf({0, 1, 2, 3}, &error) == pool);
  JO_CHECK(world.PoolOf({1, 0, 2, 3}, &error) != pool);
  JO_CHECK(world.limit_ns() == 1500000000u);
  std::vector<GpuPool::Piece> pieces;
  while (!pool->short_of_room()) {
    pieces.emplace_back();
    JO_CHECK(world.MakeRoom(*pool).empty());
    JO_CHECK(pool->Take(100 << 10, &pieces.back()).empty());
  }
  JO_CHECK(asked.empty());
  for (const GpuPool::Piece& piece : {pieces[3], pieces[5]}) pool->Leave(piece);
  GpuPool::Piece piece;
  JO_CHECK(world.MakeRoom(*pool).empty());
  JO_CHECK(pool->Take(100 << 10, &piece).empty());
  JO_CHECK(asked.size() == 2 && asked[0] == std::vector<int>({3, 5}) && asked[1].empty());
  JO_CHECK(piece.index == 3 && piece.offset == pieces[3].offset);
  JO_CHECK(pool->left().size() == 1 && pool->left()[0].index == 5);
  char* const mine = pool->region().bases[2];
  JO_CHECK(cleared.size() == 2 && cleared[0].first == mine + pieces[3].offset);
  JO_CHECK(cleared[1].first == mine + pool->DirectoryOffset(3));
}

void TestErrorsOfPythonAreTexts() {
  GpuWorld world;
  std::string error;
  JO_CHECK(world.PoolOf({0, 1}, &error) == nullptr);
  JO_CHECK(error.find("jax_overlap.init()") != std::string::npos);
  world.Configure({{},
                   [](const std::vector<int64_t>&) -> GpuRegion {
                     throw std::runtime_error("process 1 did not come");
                   },
                   nullptr,
                   1,
                   32});
  JO_CHECK(world.PoolOf({0, 1}, &error) == nullptr && error == "process 1 did not come");
}

// Call sites of the same teams share one, and of no others: a team of four, and two of two,
// have the same places.
void TestExchangesAreOfTheirTeams() {
  const auto made = MakePool();
  GpuPool::Piece of_four, of_two, again;
  JO_CHECK(made->TakeExchange({{0, 1, 2, 3}, 4, 4}, &of_four).empty());
  JO_CHECK(made->TakeExchange({{0, 1, 2, 3}, 2, 2}, &of_two).empty());
  JO_CHECK(made->TakeExchange({{0, 1, 2, 3}, 4, 4}, &again).empty());
  JO_CHECK(again.index == of_four.index && again.offset == of_four.offset);
  JO_CHECK(of_two.index != of_four.index);
  JO_CHECK(of_two.offset >= of_four.offset + of_four.bytes);
  JO_CHECK(of_two.bytes < of_four.bytes && !made->short_of_room());
}

}  // namespace
}  // namespace jax_overlap

int main() {
  using namespace jax_overlap;  // NOLINT
  TestManyCallSitesFitTheDefaultHeap();
  TestALittleIsTold();
  TestPiecesDoNotOverlapAndAreReused();
  TestFull();
  TestTooManyCallSites();
  TestWorldReclaimsWhatAllHaveLeft();
  TestErrorsOfPythonAreTexts();
  TestExchangesAreOfTheirTeams();
  std::printf("gpu_team_test: passed\n");
}
