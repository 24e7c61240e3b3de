/* Accounts of device memory, one for each emulated NPU, in this process.
 *
 * Processes do not see each other's accounts: two that use NPU 0 have
 * NPU_EMULATOR_MEMORY bytes each, where two on a real NPU share them.
 */
#ifndef NPU_EMULATOR_MEMORY_H
#define NPU_EMULATOR_MEMORY_H

#include <stddef.h>
#include <stdint.h>

enum { HOST_PAGE = 4096 };

/* A byte value that makes a NaN of every floating type, and no plausible index of an
 * integer one: a kernel that reads what nobody wrote shows it in its result. */
enum { UNINITIALISED = 0xFF };

/* Not exported: the names are common ones. */
#pragma GCC visibility push(hidden)

size_t round_up(size_t bytes, size_t multiple);

/* Take bytes from the device's account: 1, or 0 where they do not fit. */
int charge(int32_t device, size_t bytes);

void refund(int32_t device, size_t bytes);

#pragma GCC visibility pop

#endif
