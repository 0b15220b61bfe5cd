/* The row kernels, compiled once per CPU level: _codecs.c includes this file with LEVEL set to the level's name and
 * VECTOR to the number of floats in one of its registers.
 *
 * Every arithmetic step, its operands and their order are those of reference.py: results are equal byte for byte,
 * on every level. That is why nothing here may be contracted to a fused multiply-add (-ffp-contract=off).
 */

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define LISTS_(a, b) a##b
#define LISTS(a, b) LISTS_(a, b)
#define NAME(base) PASTE(base, LEVEL)
#define LANE_LIST LISTS(LIST, VECTOR)

typedef float __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias)) NAME(floats);
typedef int32_t __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias)) NAME(ints);
#define floats NAME(floats)
#define ints NAME(ints)

/* A row as float32: raw element types differ, arithmetic does not. */
static INLINE void NAME(load_row)(const uint8_t *src, int dtype, float *restrict x, size_t n)
{
    if (dtype == BFLOAT16) {
        const u16u *in = (const u16u *)src;
        for (size_t i = 0; i < n; i++)
            x[i] = as_f32((uint32_t)in[i] << 16);
    } else if (dtype == FLOAT16) {
        const u16u *in = (const u16u *)src;
        for (size_t i = 0; i < n; i++)
            x[i] = half_to_f32(in[i]);
    } else {
        memcpy(x, src, n * sizeof(float));
    }
}

static INLINE void NAME(store_row)(uint8_t *dst, int dtype, const float *restrict x, size_t n)
{
    if (dtype == BFLOAT16) {
        u16u *out = (u16u *)dst;
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = as_u32(x[i]);
            out[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
        }
    } else if (dtype == FLOAT16) {
        u16u *out = (u16u *)dst;
        for (size_t i = 0; i < n; i++) {
            float low = x[i] < -HALF_MAX ? -HALF_MAX : x[i];
            out[i] = f32_to_half(low > HALF_MAX ? HALF_MAX : low);
        }
    } else {
        memcpy(dst, x, n * sizeof(float));
    }
}

/* The largest magnitude, as bits: ordered like the values, with infinities and NaN above all of them. */
static INLINE uint32_t NAME(largest)(const float *x, size_t n)
{
    uint32_t top = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = as_u32(x[i]) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    return top;
}

/* A dot product in 16 interleaved lanes, folded in halves. */
static INLINE float NAME(dot)(const float *a, const float *b, size_t n)
{
    floats sums[LANES / VECTOR] = {0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t k = 0; k < LANES / VECTOR; k++)
            sums[k] += *(const floats *)(a + i + k * VECTOR) * *(const floats *)(b + i + k * VECTOR);
    float lanes[LANES];
    memcpy(lanes, sums, sizeof lanes);
    for (size_t j = 0; i + j < n; j++)
        lanes[j] += a[i + j] * b[i + j];
    for (size_t half = LANES / 2; half > 0; half /= 2)
        for (size_t j = 0; j < half; j++)
            lanes[j] += lanes[j + half];
    return lanes[0];
}

/* One stage of the butterfly inside a vector: lanes k and k ^ h become their sum and difference. */
#define WITHIN(v, h)                                                                                                   \
    do {                                                                                                               \
        ints flip = {LANE_LIST(h, SIGN)};                                                                              \
        (v) = SHUFFLE(v, LANE_LIST(h, PARTNER)) + (floats)((ints)(v) ^ flip);                                          \
    } while (0)

/* Unnormalised Walsh-Hadamard transform of every `span` elements, in place. */
static INLINE void NAME(hadamard)(float *x, size_t n, size_t span)
{
    if (span < VECTOR) {
        for (size_t h = 1; h < span; h *= 2)
            for (size_t i = 0; i < n; i++)
                if (!(i & h)) {
                    float a = x[i], b = x[i + h];
                    x[i] = a + b;
                    x[i + h] = a - b;
                }
        return;
    }
    for (size_t i = 0; i < n; i += VECTOR) {
        floats v = *(floats *)(x + i);
        WITHIN(v, 1);
        WITHIN(v, 2);
        if (VECTOR > 4)
            WITHIN(v, 4 & (VECTOR - 1));
        if (VECTOR > 8)
            WITHIN(v, 8 & (VECTOR - 1));
        *(floats *)(x + i) = v;
    }
    for (size_t h = VECTOR; h < span; h *= 2)
        for (size_t at = 0; at < n; at += 2 * h)
            for (size_t i = at; i < at + h; i += VECTOR) {
                floats a = *(floats *)(x + i), b = *(floats *)(x + i + h);
                *(floats *)(x + i) = a + b;
                *(floats *)(x + i + h) = a - b;
            }
}

static INLINE void NAME(encode_int8)(const float *x, size_t n, float top, u16u *meta, uint8_t *restrict q)
{
    uint16_t scale = fit_scale(top, 127.0f, 127.49f);
    float inverse = inverse_of(scale);
    *meta = scale;
    for (size_t i = 0; i < n; i++)
        q[i] = (uint8_t)as_u32(x[i] * inverse + ROUNDER);
}

static INLINE void NAME(encode_fp8)(const float *x, size_t n, float top, u16u *meta, uint8_t *restrict q)
{
    uint16_t scale = fit_scale(top, 448.0f, 460.0f);
    float inverse = inverse_of(scale);
    *meta = scale;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = as_u32(x[i] * inverse);
        uint32_t kept = bits & 0x7fffffff;
        uint32_t normal = ((kept + 0x7ffff + ((kept >> 20) & 1)) >> 20) - 960;
        uint32_t small = as_u32(as_f32(kept) + 16384.0f) - 0x46800000;
        q[i] = (uint8_t)((kept < 0x3c800000 ? small : normal) | ((bits >> 24) & 0x80));
    }
}

static INLINE void NAME(encode_int4)(const float *x, size_t n, u16u *meta, uint8_t *restrict q)
{
    /* As integers that are ordered like the floats: compilers vectorise only those minima. */
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (size_t i = 0; i < n; i++) {
        int32_t key = ordered((int32_t)as_u32(x[i]));
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    meta[1] = f32_to_half(as_f32((uint32_t)ordered(low)) + 0.0f);
    float base = half_to_f32(meta[1]);
    float span = as_f32((uint32_t)ordered(high)) - base;
    uint16_t scale = fit_scale(span > 0.0f ? span : 0.0f, 15.0f, 15.49f);
    float inverse = inverse_of(scale);
    meta[0] = scale;
    for (size_t i = 0; i < n; i++) {
        float step = (x[i] - base) * inverse;
        step = step < 0.0f ? 0.0f : step;
        step = step > 15.0f ? 15.0f : step;
        q[i] = (uint8_t)as_u32(step + ROUNDER);
    }
}

static INLINE void NAME(encode_lloyd4)(const float *x, size_t n, u16u *meta, uint8_t *restrict q)
{
    float cut[15], level[MAX_WIDTH];
    float rms = sqrtf(NAME(dot)(x, x, n) / (float)n);
    for (size_t k = 0; k < 15; k++)
        cut[k] = THRESHOLDS[k] * rms;
    size_t i = 0;
    for (; i + VECTOR <= n; i += VECTOR) {
        floats v = *(const floats *)(x + i);
        ints codes = {0};
        for (size_t k = 0; k < 15; k++)
            codes -= v > (floats){0} + cut[k]; /* a true comparison is -1 */
        int32_t lanes[VECTOR];
        memcpy(lanes, &codes, sizeof lanes);
        for (size_t j = 0; j < VECTOR; j++)
            q[i + j] = (uint8_t)lanes[j];
    }
    for (; i < n; i++) {
        q[i] = 0;
        for (size_t k = 0; k < 15; k++)
            q[i] += x[i] > cut[k];
    }
    for (i = 0; i < n; i++)
        level[i] = LEVELS[q[i]];
    *meta = f32_to_half(NAME(dot)(x, level, n) / NAME(dot)(level, level, n));
}

static INLINE void NAME(decode_fp8)(const uint8_t *q, size_t n, float scale, float *restrict x)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t kept = q[i] & 0x7f;
        float normal = as_f32((kept << 20) + (120u << 23));
        float magnitude = kept < 8 ? (float)(int32_t)kept * 0x1p-9f : normal;
        x[i] = as_f32(as_u32(magnitude) | ((uint32_t)(q[i] & 0x80) << 24)) * scale;
    }
}

static INLINE void NAME(pack)(const uint8_t *q, size_t n, uint8_t *restrict dst)
{
    size_t half = (n + 1) / 2;
    for (size_t i = 0; i < n - half; i++)
        dst[i] = (uint8_t)(q[i] | (q[i + half] << 4));
    if (n & 1)
        dst[half - 1] = q[half - 1];
}

static INLINE void NAME(unpack)(const uint8_t *src, size_t n, uint8_t *restrict q)
{
    size_t half = (n + 1) / 2;
    for (size_t i = 0; i < half; i++)
        q[i] = src[i] & 15;
    for (size_t i = 0; i < n - half; i++)
        q[i + half] = src[i] >> 4;
}

/* Inlined per codec and width, so that the compiler sees both as constants. */
static INLINE int64_t NAME(encode_loop)(
    const run_t *run, int codec, int dtype, size_t width, size_t group, size_t span, const uint8_t *raw,
    uint8_t *coded, const float *signs)
{
    float x[MAX_WIDTH];
    uint8_t nibbles[MAX_WIDTH];
    const size_t metas = codec == INT4 ? 2 : 1, count = width / group;
    const uint32_t limit = as_u32(LIMITS[codec]);
    for (size_t o = 0; o < run->outer; o++)
        for (size_t i = 0; i < run->inner; i++) {
            NAME(load_row)(raw + run->raw_offset + o * run->raw_outer + i * run->raw_row, dtype, x, width);
            if (signs) {
                for (size_t k = 0; k < width; k++)
                    x[k] *= signs[k];
                NAME(hadamard)(x, width, span);
            }
            uint32_t whole = NAME(largest)(x, width);
            if (whole > limit)
                return (int64_t)(o * run->inner + i);
            uint8_t *record = coded + run->coded_offset + o * run->coded_outer + i * run->coded_row;
            u16u *meta = (u16u *)record;
            uint8_t *codes = record + 2 * metas * count;
            uint8_t *q = codec == INT4 || codec == LLOYD4 ? nibbles : codes;
            for (size_t g = 0; g < count; g++, meta += metas) {
                const float *in = x + g * group;
                uint8_t *out = q + g * group;
                if (codec == INT4) {
                    NAME(encode_int4)(in, group, meta, out);
                } else if (codec == LLOYD4) {
                    NAME(encode_lloyd4)(in, group, meta, out);
                } else {
                    float top = as_f32(count == 1 ? whole : NAME(largest)(in, group));
                    if (codec == INT8)
                        NAME(encode_int8)(in, group, top, meta, out);
                    else
                        NAME(encode_fp8)(in, group, top, meta, out);
                }
            }
            if (q == nibbles)
                NAME(pack)(nibbles, width, codes);
        }
    return -1;
}

static INLINE void NAME(decode_loop)(
    const run_t *run, int codec, int dtype, size_t width, size_t group, size_t span, const uint8_t *coded,
    uint8_t *raw, const float *signs)
{
    float x[MAX_WIDTH];
    uint8_t nibbles[MAX_WIDTH];
    const size_t metas = codec == INT4 ? 2 : 1, count = width / group;
    for (size_t o = 0; o < run->outer; o++)
        for (size_t i = 0; i < run->inner; i++) {
            const uint8_t *record = coded + run->coded_offset + o * run->coded_outer + i * run->coded_row;
            const u16u *meta = (const u16u *)record;
            const uint8_t *q = record + 2 * metas * count;
            if (codec == INT4 || codec == LLOYD4) {
                NAME(unpack)(q, width, nibbles);
                q = nibbles;
            }
            for (size_t g = 0; g < count; g++, meta += metas) {
                float scale = half_to_f32(meta[0]), *out = x + g * group;
                const uint8_t *in = q + g * group;
                if (codec == INT8) {
                    for (size_t k = 0; k < group; k++)
                        out[k] = (float)(int8_t)in[k] * scale;
                } else if (codec == FP8) {
                    NAME(decode_fp8)(in, group, scale, out);
                } else if (codec == INT4) {
                    float base = half_to_f32(meta[1]);
                    for (size_t k = 0; k < group; k++)
                        out[k] = (float)(int32_t)in[k] * scale + base;
                } else {
                    for (size_t k = 0; k < group; k++)
                        out[k] = LEVELS[in[k]] * scale;
                }
            }
            if (signs) {
                NAME(hadamard)(x, width, span);
                for (size_t k = 0; k < width; k++)
                    x[k] *= signs[k];
            }
            NAME(store_row)(raw + run->raw_offset + o * run->raw_outer + i * run->raw_row, dtype, x, width);
        }
}

/* One copy of a loop for each of the widths that models have, and one for any width. */
#define SPECIALISE(RESULT, LOOP, CODEC, FROM, TO)                                                                      \
    do {                                                                                                               \
        size_t w = run->width, g = run->group, s = run->rotation;                                                      \
        if (w == 64 && g == 64 && (s == 1 || s == 64))                                                                 \
            RESULT LOOP(run, CODEC, dtype, 64, 64, 64, FROM, TO, signs);                                               \
        else if (w == 128 && g == 128 && (s == 1 || s == 128))                                                         \
            RESULT LOOP(run, CODEC, dtype, 128, 128, 128, FROM, TO, signs);                                            \
        else                                                                                                           \
            RESULT LOOP(run, CODEC, dtype, w, g, s, FROM, TO, signs);                                                  \
    } while (0)

static int64_t NAME(encode_rows)(
    const run_t *run, int codec, int dtype, const uint8_t *raw, uint8_t *coded, const float *signs)
{
    int64_t refused;
    if (codec == INT8)
        SPECIALISE(refused =, NAME(encode_loop), INT8, raw, coded);
    else if (codec == FP8)
        SPECIALISE(refused =, NAME(encode_loop), FP8, raw, coded);
    else if (codec == INT4)
        SPECIALISE(refused =, NAME(encode_loop), INT4, raw, coded);
    else
        refused = NAME(encode_loop)(run, LLOYD4, dtype, run->width, run->group, run->rotation, raw, coded, signs);
    return refused;
}

static void NAME(decode_rows)(
    const run_t *run, int codec, int dtype, const uint8_t *coded, uint8_t *raw, const float *signs)
{
    if (codec == INT8)
        SPECIALISE(, NAME(decode_loop), INT8, coded, raw);
    else if (codec == FP8)
        SPECIALISE(, NAME(decode_loop), FP8, coded, raw);
    else if (codec == INT4)
        SPECIALISE(, NAME(decode_loop), INT4, coded, raw);
    else
        NAME(decode_loop)(run, LLOYD4, dtype, run->width, run->group, run->rotation, coded, raw, signs);
}

static void NAME(split)(const uint8_t *raw, size_t width, size_t n, uint8_t *const *planes)
{
    if (width == 2) {
        const u16u *in = (const u16u *)raw;
        uint8_t *restrict high = planes[0], *restrict low = planes[1];
        for (size_t i = 0; i < n; i++) {
            uint16_t v = (uint16_t)((in[i] << 1) | (in[i] >> 15));
            high[i] = (uint8_t)(v >> 8);
            low[i] = (uint8_t)v;
        }
    } else {
        const u32u *in = (const u32u *)raw;
        uint8_t *restrict a = planes[0], *restrict b = planes[1], *restrict c = planes[2], *restrict d = planes[3];
        for (size_t i = 0; i < n; i++) {
            uint32_t v = (in[i] << 1) | (in[i] >> 31);
            a[i] = (uint8_t)(v >> 24);
            b[i] = (uint8_t)(v >> 16);
            c[i] = (uint8_t)(v >> 8);
            d[i] = (uint8_t)v;
        }
    }
}

static void NAME(join)(uint8_t *const *planes, size_t width, size_t n, uint8_t *raw)
{
    if (width == 2) {
        u16u *restrict out = (u16u *)raw;
        const uint8_t *high = planes[0], *low = planes[1];
        for (size_t i = 0; i < n; i++) {
            uint16_t v = (uint16_t)((high[i] << 8) | low[i]);
            out[i] = (uint16_t)((v >> 1) | (v << 15));
        }
    } else {
        u32u *restrict out = (u32u *)raw;
        const uint8_t *a = planes[0], *b = planes[1], *c = planes[2], *d = planes[3];
        for (size_t i = 0; i < n; i++) {
            uint32_t v = ((uint32_t)a[i] << 24) | ((uint32_t)b[i] << 16) | ((uint32_t)c[i] << 8) | d[i];
            out[i] = (v >> 1) | (v << 31);
        }
    }
}

#undef SPECIALISE
#undef WITHIN
#undef floats
#undef ints
#undef LANE_LIST
#undef NAME
#undef PASTE
#undef PASTE_
#undef LISTS
#undef LISTS_
