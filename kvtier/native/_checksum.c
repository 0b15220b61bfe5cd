/* kvtier.native._checksum: copies a block past the caches and computes its XXH3-128 in the same pass.
 *
 * XXH3-128, seed 0, default secret, inputs longer than 240 bytes (the xxHash specification, 0.2.0). The hash
 * reads each 1 KiB stripe block from L1; the copy of the same bytes leaves by non-temporal stores, so the target's
 * cache lines are neither fetched nor do they push out anybody's data.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "xxhash's own build is used on big-endian machines"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define STREAMS 1
#else
#define STREAMS 0
#endif

enum { STRIPE = 64, SECRET = 192, LANES = 8, BLOCK = (SECRET - STRIPE) / 8 * STRIPE, STREAM_FROM = 64 << 10 };

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t P32_1 = 0x9E3779B1U, P32_2 = 0x85EBCA77U, P32_3 = 0xC2B2AE3DU;
static const uint64_t P64_1 = 0x9E3779B185EBCA87ULL, P64_2 = 0xC2B2AE3D27D4EB4FULL, P64_3 = 0x165667B19E3779F9ULL,
                      P64_4 = 0x85EBCA77C2B2AE63ULL, P64_5 = 0x27D4EB2F165667C5ULL;

static inline uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline void accumulate(uint64_t *restrict acc, const uint8_t *restrict data, const uint8_t *restrict key) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t value = word(data + 8 * lane), mixed = value ^ word(key + 8 * lane);
        acc[lane ^ 1] += value;
        acc[lane] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
    }
}

static inline void scramble(uint64_t *acc) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t value = acc[lane] ^ acc[lane] >> 47 ^ word(secret + SECRET - STRIPE + 8 * lane);
        acc[lane] = value * P32_1;
    }
}

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merge(const uint64_t *acc, const uint8_t *key, uint64_t start) {
    for (int pair = 0; pair < LANES / 2; pair++)
        start += fold(acc[2 * pair] ^ word(key + 16 * pair), acc[2 * pair + 1] ^ word(key + 16 * pair + 8));
    start ^= start >> 37;
    start *= 0x165667919E3779F9ULL;
    return start ^ start >> 32;
}

#if STREAMS
/* One 1 KiB block: both accumulators stay in registers; the copy leaves by non-temporal stores right after the hash
 * has brought the bytes into L1. */
__attribute__((target("avx2"))) static void add_blocks_avx2(uint64_t *acc, const uint8_t *restrict data,
                                                            uint8_t *restrict to, size_t blocks, int streamed) {
    const __m256i prime = _mm256_set1_epi32((int)P32_1);
    __m256i sums[2] = {_mm256_loadu_si256((const __m256i *)acc), _mm256_loadu_si256((const __m256i *)acc + 1)};
    for (size_t block = 0; block < blocks; block++, data += BLOCK) {
        for (int stripe = 0; stripe < BLOCK / STRIPE; stripe++) {
            const __m256i *in = (const __m256i *)(data + stripe * STRIPE);
            const __m256i *key = (const __m256i *)(secret + 8 * stripe);
            _mm_prefetch((const char *)in + 512, _MM_HINT_T0);
            for (int half = 0; half < 2; half++) {
                __m256i value = _mm256_loadu_si256(in + half);
                __m256i mixed = _mm256_xor_si256(value, _mm256_loadu_si256(key + half));
                __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
                __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
                sums[half] = _mm256_add_epi64(product, _mm256_add_epi64(sums[half], swapped));
            }
        }
        for (int half = 0; half < 2; half++) {
            const __m256i key = _mm256_loadu_si256((const __m256i *)(secret + SECRET - STRIPE) + half);
            __m256i value = _mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47));
            value = _mm256_xor_si256(value, key);
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(value, 32), prime);
            sums[half] = _mm256_add_epi64(_mm256_mul_epu32(value, prime), _mm256_slli_epi64(high, 32));
        }
        if (to == NULL)
            continue;
        if (streamed)
            for (int at = 0; at < BLOCK / 32; at++)
                _mm256_stream_si256((__m256i *)to + at, _mm256_loadu_si256((const __m256i *)data + at));
        else
            memcpy(to, data, BLOCK);
        to += BLOCK;
    }
    _mm256_storeu_si256((__m256i *)acc, sums[0]);
    _mm256_storeu_si256((__m256i *)acc + 1, sums[1]);
}
#endif

/* Adds whole 1 KiB blocks of the stream (head and data), copying them unless `to` is NULL. `streamed`: past the
 * caches, for targets on a 32-byte boundary. */
static void add_blocks(uint64_t *acc, const uint8_t *restrict data, uint8_t *restrict to, size_t blocks, int streamed) {
#if STREAMS
    if (__builtin_cpu_supports("avx2")) {
        add_blocks_avx2(acc, data, to, blocks, streamed);
        return;
    }
#endif
    (void)streamed;
    for (size_t block = 0; block < blocks; block++, data += BLOCK) {
        for (int stripe = 0; stripe < BLOCK / STRIPE; stripe++)
            accumulate(acc, data + stripe * STRIPE, secret + 8 * stripe);
        scramble(acc);
        if (to != NULL) {
            memcpy(to, data, BLOCK);
            to += BLOCK;
        }
    }
}

static void checksum(const uint8_t head[STRIPE], const uint8_t *data, uint8_t *to, size_t count, uint8_t out[16]) {
    uint64_t acc[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    uint8_t first[BLOCK], last[STRIPE];
    const size_t total = STRIPE + count, blocks = (total - 1) / BLOCK;
    const size_t prefix = blocks ? BLOCK - STRIPE : count;
    const int streamed = STREAMS && to != NULL && count >= STREAM_FROM;

    memcpy(first, head, STRIPE);
    memcpy(first + STRIPE, data, prefix);
    if (to != NULL)
        memcpy(to, data, prefix);
    if (blocks) {
        add_blocks(acc, first, NULL, 1, 0);
        const size_t aligned = streamed && ((uintptr_t)(to + prefix) & 31) == 0;
        add_blocks(acc, data + prefix, to == NULL ? NULL : to + prefix, blocks - 1, (int)aligned);
    }
    const size_t done = blocks * BLOCK;                 /* bytes of head and data */
    const uint8_t *rest = blocks ? data + done - STRIPE : first;
    if (blocks && to != NULL)
        memcpy(to + done - STRIPE, rest, total - done);
    for (size_t stripe = 0; stripe < (total - 1 - done) / STRIPE; stripe++)
        accumulate(acc, rest + stripe * STRIPE, secret + 8 * stripe);
    memcpy(last, blocks || count >= STRIPE ? data + count - STRIPE : first + total - STRIPE, STRIPE);
    accumulate(acc, last, secret + SECRET - STRIPE - 7);
#if STREAMS
    if (streamed)
        _mm_sfence();
#endif
    uint64_t low = merge(acc, secret + 11, total * P64_1);
    uint64_t high = merge(acc, secret + SECRET - STRIPE - 11, ~(total * P64_2));
    for (int at = 0; at < 8; at++) {                    /* canonical: big-endian, high half first */
        out[at] = (uint8_t)(high >> (56 - 8 * at));
        out[8 + at] = (uint8_t)(low >> (56 - 8 * at));
    }
}

static PyObject *copy_checksum(PyObject *self, PyObject *args) {
    Py_buffer head, source, target = {0};
    PyObject *to, *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*O", &head, &source, &to))
        return NULL;
    if (to != Py_None && PyObject_GetBuffer(to, &target, PyBUF_WRITABLE) < 0)
        goto done;
    if (head.len != STRIPE || STRIPE + source.len <= 240 || (to != Py_None && target.len < source.len)) {
        PyErr_Format(PyExc_ValueError,
                     "head of %zd, source of %zd, target of %zd bytes: expected 64, more than 176, and a target "
                     "at least as long as the source",
                     head.len, source.len, target.len);
        goto done;
    }
    uint8_t digest[16];
    Py_BEGIN_ALLOW_THREADS
    checksum(head.buf, source.buf, to == Py_None ? NULL : target.buf, (size_t)source.len, digest);
    Py_END_ALLOW_THREADS
    result = PyBytes_FromStringAndSize((const char *)digest, sizeof digest);
done:
    if (target.obj != NULL)
        PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    PyBuffer_Release(&head);
    return result;
}

static PyMethodDef methods[] = {
    {"copy_checksum", copy_checksum, METH_VARARGS,
     "copy_checksum(head, source, target or None): copy source and return xxh3_128(head + source), 16 bytes."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_checksum", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__checksum(void) { return PyModule_Create(&module); }
