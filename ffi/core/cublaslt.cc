#include "core/cublaslt.h"

#include <dlfcn.h>

#include <utility>

namespace jax_overlap {
namespace {

#define JO_TEXT_OF(x) #x
#define JO_TEXT(x) JO_TEXT_OF(x)
// Its interface changes with the major version.
constexpr char kName[] = "libcublasLt.so." JO_TEXT(CUBLAS_VER_MAJOR);

std::string& Path() {
  static std::string* const path = new std::string;
  return *path;
}

struct Loaded {
  CublasLt functions = {};
  std::string error;

  Loaded() {
    // What JAX has loaded is found by its name.
    void* library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr && !Path().empty()) {
      library = dlopen(Path().c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) {
      const char* const text = dlerror();
      error = std::string(kName) + " could not be loaded (" + (text == nullptr ? "" : text) + ")";
      return;
    }
    const auto find = [&](auto& function, const char* name) {
      using Function = std::remove_reference_t<decltype(function)>;
      function = reinterpret_cast<Function>(dlsym(library, name));
      if (function == nullptr) error = std::string(kName) + " has no " + name;
    };
#define JO_FIND(name) find(functions.name, "cublasLt" #name);
    JO_CUBLASLT_FUNCTIONS(JO_FIND)
#undef JO_FIND
  }
};

}  // namespace

const CublasLt* CublasLt::Get(std::string* error) {
  static const Loaded* const loaded = new Loaded;
  *error = loaded->error;
  return loaded->error.empty() ? &loaded->functions : nullptr;
}

void CublasLt::SetPath(std::string path) { Path() = std::move(path); }

}  // namespace jax_overlap
