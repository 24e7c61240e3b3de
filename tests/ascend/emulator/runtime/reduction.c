/* The emulated HCCL: types of elements, and reductions over them.
 *
 * Floating types are reduced in fp64 and integers in 64 bits, always in the order of
 * the ranks, and rounded once at the end: every rank gets the same bits, in every run.
 * Real HCCL reduces in the type itself and in an order of its own, so results may
 * differ there by roundings.
 */
#include <math.h>
#include <string.h>

#include "hccl.h"

size_t element_bytes(HcclDataType type)
{
    switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
    case HCCL_DATA_TYPE_HIF8:
    case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2:
    case HCCL_DATA_TYPE_FP8E8M0:
        return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
        return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
        return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
        return 8;
    case HCCL_DATA_TYPE_INT128:
        return 16;
    }
    return 0;
}

/* --- Floating types ----------------------------------------------------------- */

static double bfloat16_to_double(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* To odd in fp32 first, then to nearest even: what one rounding from fp64 would give.
 */
static uint16_t double_to_bfloat16(double exact)
{
    float value = (float)exact;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (isnan(value)) {
        return 0x7FC0;
    }
    if (!isinf(value) && value != exact) {
        int away_from_zero = fabs((double)value) > fabs(exact);
        bits = (bits - (uint32_t)away_from_zero) | 1;
    }
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/* By hand: C compilers before GCC 12 have no _Float16 on x86-64. */
enum { FP16_MANTISSA_BITS = 10, FP16_MIN_EXPONENT = -14, FP16_INFINITY = 0x7C00 };

static double float16_to_double(uint16_t bits)
{
    int exponent = (bits & FP16_INFINITY) >> FP16_MANTISSA_BITS;
    int mantissa = bits & ((1 << FP16_MANTISSA_BITS) - 1);
    double value;
    if ((bits & FP16_INFINITY) == FP16_INFINITY) {
        value = mantissa ? (double)NAN : (double)INFINITY;
    } else if (exponent == 0) {
        value = ldexp(mantissa, FP16_MIN_EXPONENT - FP16_MANTISSA_BITS);
    } else {
        value = ldexp(mantissa + (1 << FP16_MANTISSA_BITS),
                      exponent - 1 + FP16_MIN_EXPONENT - FP16_MANTISSA_BITS);
    }
    return bits & 0x8000 ? -value : value;
}

/* A mantissa that rounds up to the next power of two carries into the exponent, and the
 * largest one into infinity, by plain addition. */
static uint16_t double_to_float16(double value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double size = fabs(value);
    if (isnan(value)) {
        return FP16_INFINITY | 0x200;
    }
    if (size >= 65536.0) {
        return sign | FP16_INFINITY;
    }
    if (size == 0) { /* frexp gives it the exponent of 0.5 */
        return sign;
    }
    int exponent;
    frexp(size, &exponent);
    exponent = exponent - 1 < FP16_MIN_EXPONENT ? FP16_MIN_EXPONENT : exponent - 1;
    int mantissa = (int)rint(ldexp(size, FP16_MANTISSA_BITS - exponent));
    int bits = ((exponent - FP16_MIN_EXPONENT) << FP16_MANTISSA_BITS) + mantissa;
    return (uint16_t)(sign | bits);
}

static int is_floating(HcclDataType type)
{
    return type == HCCL_DATA_TYPE_FP16 || type == HCCL_DATA_TYPE_BFP16 ||
           type == HCCL_DATA_TYPE_FP32 || type == HCCL_DATA_TYPE_FP64;
}

static double load_floating(const void *data, size_t i, HcclDataType type)
{
    switch (type) {
    case HCCL_DATA_TYPE_FP16:
        return float16_to_double(((const uint16_t *)data)[i]);
    case HCCL_DATA_TYPE_BFP16:
        return bfloat16_to_double(((const uint16_t *)data)[i]);
    case HCCL_DATA_TYPE_FP32:
        return ((const float *)data)[i];
    default:
        return ((const double *)data)[i];
    }
}

static void store_floating(void *data, size_t i, HcclDataType type, double value)
{
    switch (type) {
    case HCCL_DATA_TYPE_FP16:
        ((uint16_t *)data)[i] = double_to_float16(value);
        break;
    case HCCL_DATA_TYPE_BFP16:
        ((uint16_t *)data)[i] = double_to_bfloat16(value);
        break;
    case HCCL_DATA_TYPE_FP32:
        ((float *)data)[i] = (float)value;
        break;
    default:
        ((double *)data)[i] = value;
    }
}

/* A NaN stays one in a maximum or minimum, as in torch's. */
static double combine_floating(double a, double b, HcclReduceOp op)
{
    switch (op) {
    case HCCL_REDUCE_SUM:
        return a + b;
    case HCCL_REDUCE_PROD:
        return a * b;
    case HCCL_REDUCE_MAX:
        return isnan(a) || a > b ? a : b;
    default:
        return isnan(a) || a < b ? a : b;
    }
}

/* --- Integers, in 64 bits that wrap as two's complement does ------------------ */

static int is_unsigned(HcclDataType type)
{
    return type == HCCL_DATA_TYPE_UINT8 || type == HCCL_DATA_TYPE_UINT16 ||
           type == HCCL_DATA_TYPE_UINT32 || type == HCCL_DATA_TYPE_UINT64;
}

static uint64_t load_integer(const void *data, size_t i, HcclDataType type)
{
    switch (type) {
    case HCCL_DATA_TYPE_INT8:
        return (uint64_t)((const int8_t *)data)[i];
    case HCCL_DATA_TYPE_INT16:
        return (uint64_t)((const int16_t *)data)[i];
    case HCCL_DATA_TYPE_INT32:
        return (uint64_t)((const int32_t *)data)[i];
    case HCCL_DATA_TYPE_UINT8:
        return ((const uint8_t *)data)[i];
    case HCCL_DATA_TYPE_UINT16:
        return ((const uint16_t *)data)[i];
    case HCCL_DATA_TYPE_UINT32:
        return ((const uint32_t *)data)[i];
    default:
        return ((const uint64_t *)data)[i];
    }
}

static void store_integer(void *data, size_t i, HcclDataType type, uint64_t value)
{
    switch (element_bytes(type)) {
    case 1:
        ((uint8_t *)data)[i] = (uint8_t)value;
        break;
    case 2:
        ((uint16_t *)data)[i] = (uint16_t)value;
        break;
    case 4:
        ((uint32_t *)data)[i] = (uint32_t)value;
        break;
    default:
        ((uint64_t *)data)[i] = value;
    }
}

static uint64_t combine_integer(uint64_t a, uint64_t b, HcclReduceOp op, int no_sign)
{
    int greater = no_sign ? a > b : (int64_t)a > (int64_t)b;
    switch (op) {
    case HCCL_REDUCE_SUM:
        return a + b;
    case HCCL_REDUCE_PROD:
        return a * b;
    case HCCL_REDUCE_MAX:
        return greater ? a : b;
    default:
        return greater ? b : a;
    }
}

/* --- Over the ranks ----------------------------------------------------------- */

static void reduce_floating(void *output, const void *const *slots, uint32_t ranks,
                            size_t count, HcclDataType type, HcclReduceOp op)
{
    for (size_t i = 0; i < count; i++) {
        double value = load_floating(slots[0], i, type);
        for (uint32_t rank = 1; rank < ranks; rank++) {
            value = combine_floating(value, load_floating(slots[rank], i, type), op);
        }
        store_floating(output, i, type, value);
    }
}

static void reduce_integer(void *output, const void *const *slots, uint32_t ranks,
                           size_t count, HcclDataType type, HcclReduceOp op)
{
    int no_sign = is_unsigned(type);
    for (size_t i = 0; i < count; i++) {
        uint64_t value = load_integer(slots[0], i, type);
        for (uint32_t rank = 1; rank < ranks; rank++) {
            uint64_t other = load_integer(slots[rank], i, type);
            value = combine_integer(value, other, op, no_sign);
        }
        store_integer(output, i, type, value);
    }
}

HcclResult reduce_slots(HcclComm comm, void *output, size_t count, HcclDataType type,
                        HcclReduceOp op)
{
    uint32_t ranks = ranks_of(comm);
    const void *slots[MAX_RANKS];
    for (uint32_t rank = 0; rank < ranks; rank++) {
        slots[rank] = slot_of(comm, rank);
    }
    if (is_floating(type)) {
        reduce_floating(output, slots, ranks, count, type, op);
        return HCCL_SUCCESS;
    }
    if (type > HCCL_DATA_TYPE_UINT32) {
        return HCCL_E_NOT_SUPPORT;
    }
    reduce_integer(output, slots, ranks, count, type, op);
    return HCCL_SUCCESS;
}
