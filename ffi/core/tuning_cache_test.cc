// What was measured survives the process, and a damaged or read-only file survives us.
#include "core/tuning_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/testing.h"

namespace jax_overlap {
namespace {

void KeptAndRead(const std::string& path) {
  TuningCache first(path);
  JO_CHECK(first.Get("a").empty());
  first.Put("a", "1");
  first.Put("b", "2");
  JO_CHECK(first.Get("a") == "1");
  TuningCache second(path);
  JO_CHECK(second.Get("a") == "1" && second.Get("b") == "2" && second.Get("c").empty());
  // What does not serve any more is measured anew, once.
  second.Put("b", "3");
  JO_CHECK(second.Get("b") == "3" && TuningCache(path).Get("b") == "3");
  const auto size = std::filesystem::file_size(path);
  second.Put("b", "3");
  JO_CHECK(std::filesystem::file_size(path) == size);
}

void DamagedLines(const std::string& path) {
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::ate);
    file << "c\t5\t0123\n\tx\n\n\xff\xfe garbage \t\t\nd\t6";
  }
  TuningCache cache(path);
  JO_CHECK(cache.Get("a") == "1" && cache.Get("c").empty() && cache.Get("d").empty());
  cache.Put("d", "7");  // after a line that was cut short
  JO_CHECK(TuningCache(path).Get("d") == "7");
  JO_CHECK(truncate(path.c_str(), 30) == 0);
  JO_CHECK(TuningCache(path).Get("d").empty());
}

void NotWritable(const std::string& folder) {
  // A file where a folder should be: also for who may write everywhere.
  std::ofstream(folder + "/file") << "text";
  TuningCache cache(folder + "/file/cache");
  cache.Put("a", "1");
  JO_CHECK(cache.Get("a") == "1");
  TuningCache none("");
  none.Put("a", "1");
  JO_CHECK(none.Get("a") == "1");
  TuningCache directory(folder);
  directory.Put("a", "1");
  JO_CHECK(directory.Get("a") == "1");
}

}  // namespace
}  // namespace jax_overlap

int main() {
  using namespace jax_overlap;  // NOLINT
  std::string folder = std::filesystem::temp_directory_path() / "tuning_cache_test.XXXXXX";
  JO_CHECK(mkdtemp(folder.data()) != nullptr);
  const std::string path = folder + "/a/b/cache";
  KeptAndRead(path);
  DamagedLines(path);
  NotWritable(folder);
  std::printf("tuning_cache_test: 3 passed, 0 failed\n");
}
