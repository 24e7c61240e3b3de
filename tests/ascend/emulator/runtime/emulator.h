/* What the files of the emulated AscendCL share.
 *
 * Signatures, enumerations and error codes come from the AscendCL headers that
 * torch_npu's wheel carries (torch_npu/include/third_party/acl/inc), so a function
 * defined here with another signature than CANN's does not compile. Only the
 * behaviour is ours: device memory is host memory, and every operation has finished
 * when its function returns.
 */
#ifndef NPU_EMULATOR_H
#define NPU_EMULATOR_H

#include <stddef.h>
#include <stdint.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "acl/error_codes/rt_error_codes.h"

enum { MAX_DEVICES = 64 };

/* Not exported: the names are common ones. */
#pragma GCC visibility push(hidden)

/* NPUs that this process sees: NPU_EMULATOR_DEVICES, narrowed as CANN would. */
int32_t visible_devices(void);

/* Device of the calling thread, -1 before aclrtSetDevice. */
int32_t current_device(void);

/* Bytes of memory of one NPU: NPU_EMULATOR_MEMORY, or 4 GiB. */
size_t device_memory(void);

/* Called by every generated stub: names the function on standard error, once, and
 * returns CANN's "not supported". */
int report_unimplemented(const char *name, int *reported);

#pragma GCC visibility pop

#endif
