// NVSHMEM as this process has it: one a process, started once, never ended.
//
// Errors are std::runtime_error, for Python to show. Calls marked collective return when all
// processes have made them, so none may be made under a lock that another thread needs.
#pragma once

#include <array>
#include <cstddef>
#include <string>

namespace jax_overlap {

// Of the NVSHMEM whose headers and device library this was built with, and of the
// libnvshmem_host that is loaded.
std::array<int, 3> BuiltNvshmemVersion();
std::array<int, 3> RuntimeNvshmemVersion();

// What one process makes and all hand to InitNvshmem, which finds them by it.
std::string NvshmemUniqueId();

// Collective. Joins as `rank` of `size` with the CUDA device of this process, and loads the
// kernels. A second call with the same arguments does nothing; one with others throws, since
// NVSHMEM would ignore them.
//
// There is no counterpart. Ending NVSHMEM is collective, so a process that ends early, or
// fails, would hang in it; and at the exit of a process, in destructors of static objects,
// the CUDA driver may have gone already. What a process holds is freed with it.
void InitNvshmem(int rank, int size, int device, const std::string& unique_id);

// Collective, and `bytes` the same everywhere: zeroed memory of the symmetric heap, for good.
char* AllocateSymmetric(size_t bytes);

// Where `address`, of the own symmetric heap, lies in that of `pe`; null if it is not mapped.
char* PeerAddress(char* address, int pe);

}  // namespace jax_overlap
