/* The emulated AscendCL: start-up, logs, options, profiling hooks.
 *
 * Devices are in device.c, memory in memory.c and virtual_memory.c, streams and events
 * in stream.c. What torch_npu links and none of them defines becomes a generated stub
 * (build.py) that calls report_unimplemented.
 */
#include "emulator.h"

#include <stdio.h>
#include <string.h>

#include "profiling/aprof_pub.h"

/* --- Unimplemented functions -------------------------------------------------- */

int report_unimplemented(const char *name, int *reported)
{
    if (!*reported) {
        *reported = 1;
        fprintf(stderr, "[NPU emulator] %s is not implemented\n", name);
    }
    return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

/* --- Start and end ------------------------------------------------------------ */

aclError aclInit(const char *configPath)
{
    return ACL_SUCCESS;
}

aclError aclFinalize(void)
{
    return ACL_SUCCESS;
}

/* --- Logs and errors: every error is returned where it happens, none is kept --- */

void aclAppLog(aclLogLevel logLevel, const char *func, const char *file, uint32_t line,
               const char *fmt, ...)
{
}

const char *aclGetRecentErrMsg(void)
{
    return "";
}

aclError aclrtGetLastError(aclrtLastErrLevel level)
{
    return ACL_SUCCESS;
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel level)
{
    return ACL_SUCCESS;
}

/* --- Options: system parameters are remembered, compile options have no compiler ---
 */

enum { SYSTEM_PARAMETERS = 64 };

static int64_t system_parameters[SYSTEM_PARAMETERS];

aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t value)
{
    if ((unsigned)opt >= SYSTEM_PARAMETERS) {
        return ACL_ERROR_INVALID_PARAM;
    }
    system_parameters[opt] = value;
    return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt opt, int64_t *value)
{
    if ((unsigned)opt >= SYSTEM_PARAMETERS) {
        return ACL_ERROR_INVALID_PARAM;
    }
    *value = system_parameters[opt];
    return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value)
{
    return aclrtSetSysParamOpt(opt, value);
}

aclError aclSetCompileopt(aclCompileOpt opt, const char *value)
{
    return ACL_SUCCESS;
}

size_t aclGetCompileoptSize(aclCompileOpt opt)
{
    return 1; /* of the empty string that aclGetCompileopt answers */
}

aclError aclGetCompileopt(aclCompileOpt opt, char *value, size_t length)
{
    if (length == 0) {
        return ACL_ERROR_INVALID_PARAM;
    }
    value[0] = '\0';
    return ACL_SUCCESS;
}

aclError aclopSetCompileFlag(aclOpCompileFlag flag)
{
    return ACL_SUCCESS;
}

/* --- Dumps and profiling: accepted, and nothing is recorded ------------------- */

aclError aclmdlInitDump(void)
{
    return ACL_SUCCESS;
}

aclError aclmdlSetDump(const char *dumpCfgPath)
{
    return ACL_SUCCESS;
}

aclError aclmdlFinalizeDump(void)
{
    return ACL_SUCCESS;
}

uint64_t MsprofSysCycleTime(void)
{
    return 0;
}

uint64_t MsprofGetHashId(const char *hashInfo, size_t length)
{
    return 0;
}

int32_t MsprofRegisterCallback(uint32_t moduleId, ProfCommandHandle handle)
{
    return 0;
}

int32_t MsprofReportApi(uint32_t nonPersistantFlag, const struct MsprofApi *api)
{
    return 0;
}

int32_t MsprofReportCompactInfo(uint32_t nonPersistantFlag, const VOID_PTR data,
                                uint32_t length)
{
    return 0;
}

int32_t MsprofReportAdditionalInfo(uint32_t nonPersistantFlag, const VOID_PTR data,
                                   uint32_t length)
{
    return 0;
}
