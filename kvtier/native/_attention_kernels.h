/* Attention over paged KV and the steps between a decoder's matrix products, compiled once per CPU level:
 * _attention.c includes this file with LEVEL set to the level's name, VECTOR to the number of floats in one of its
 * registers, MULTIPLY_ADD(a, b, c) to its fused a * b + c where it has one, and AT_LEAST(x, low) and AT_MOST(x, high) to
 * its maximum and minimum, which leave a NaN in x alone.
 *
 * Attention is free to fuse and to choose its order of summation. Everything else rounds where torch rounds: each
 * product and each sum on its own (-ffp-contract=off), to the element type after every step.
 */

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define LISTS_(a, b) a##b
#define LISTS(a, b) LISTS_(a, b)
#define NAME(base) PASTE(base, LEVEL)
#define LANE_LIST LISTS(LIST, VECTOR)

typedef float __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias)) NAME(floats);
typedef int32_t __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias)) NAME(ints);
typedef uint32_t __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias)) NAME(words);
typedef uint16_t __attribute__((vector_size(2 * VECTOR), aligned(2), may_alias)) NAME(halves);
#define floats NAME(floats)
#define ints NAME(ints)
#define words NAME(words)
#define halves NAME(halves)

/* ---- elements ------------------------------------------------------------------------------------------------- */

static INLINE floats NAME(spread)(float value)
{
    return (floats){0} + value;
}

static INLINE floats NAME(choose)(ints where, floats yes, floats no)
{
    return (floats)((where & (ints)yes) | (~where & (ints)no));
}

/* VECTOR elements from number `at` on, as float32. */
static INLINE floats NAME(load)(const void *from, size_t at, int dtype)
{
    if (dtype == BFLOAT16)
        return (floats)(__builtin_convertvector(*(const halves *)((const uint16_t *)from + at), words) << 16);
    return *(const floats *)((const float *)from + at);
}

/* To the nearest element, ties to even; a NaN stays one. */
static INLINE words NAME(rounded_bits)(floats x)
{
    words bits = (words)x;
    words near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words nan = (words)(x != x);
    return (nan & 0x7fc0) | (~nan & near);
}

static INLINE void NAME(store)(void *to, size_t at, floats x, int dtype)
{
    if (dtype == BFLOAT16)
        *(halves *)((uint16_t *)to + at) = __builtin_convertvector(NAME(rounded_bits)(x), halves);
    else
        *(floats *)((float *)to + at) = x;
}

static INLINE floats NAME(rounded)(floats x, int dtype)
{
    return dtype == BFLOAT16 ? (floats)(NAME(rounded_bits)(x) << 16) : x;
}

/* exp, to about one unit in the last place (Cephes' polynomial), of arguments within what a float can hold: below, the
 * smallest normal float stands for 0, above, 2e38 for infinity. A NaN stays one. */
static INLINE floats NAME(exponential)(floats x)
{
    floats held = AT_MOST(AT_LEAST(x, NAME(spread)(-87.3f)), NAME(spread)(88.3f));
    floats shifted = MULTIPLY_ADD(held, NAME(spread)(LOG2_E), NAME(spread)(ROUNDER)), whole = shifted - ROUNDER;
    floats r = MULTIPLY_ADD(whole, NAME(spread)(-LN2_LOW), MULTIPLY_ADD(whole, NAME(spread)(-LN2_HIGH), held));
    floats p = NAME(spread)(1.9875691500e-4f);
    p = MULTIPLY_ADD(p, r, NAME(spread)(1.3981999507e-3f));
    p = MULTIPLY_ADD(p, r, NAME(spread)(8.3334519073e-3f));
    p = MULTIPLY_ADD(p, r, NAME(spread)(4.1665795894e-2f));
    p = MULTIPLY_ADD(p, r, NAME(spread)(1.6666665459e-1f));
    p = MULTIPLY_ADD(p, r, NAME(spread)(5.0000001201e-1f));
    floats result = MULTIPLY_ADD(p * r, r, r) + 1.0f;
    return (floats)((ints)result + ((ints)shifted << 23));
}

/* Lane k of the result: lane k + h of x; the upper lanes do not matter. */
#if defined(__clang__)
#define DOWN(x, h) __builtin_shufflevector(x, x, LANE_LIST(h, ROTATED))
#else
#define DOWN(x, h) __builtin_shuffle(x, (ints){LANE_LIST(h, ROTATED)})
#endif

static INLINE float NAME(folded_sum)(floats x)
{
    if (VECTOR > 8)
        x += DOWN(x, 8);
    if (VECTOR > 4)
        x += DOWN(x, 4);
    x += DOWN(x, 2);
    x += DOWN(x, 1);
    return x[0];
}

static INLINE float NAME(folded_max)(floats x)
{
    if (VECTOR > 8)
        x = AT_LEAST(DOWN(x, 8), x);
    if (VECTOR > 4)
        x = AT_LEAST(DOWN(x, 4), x);
    x = AT_LEAST(DOWN(x, 2), x);
    x = AT_LEAST(DOWN(x, 1), x);
    return x[0];
}

/* ---- attention ------------------------------------------------------------------------------------------------ */

/* The lower half of the result: sums of neighbours in a; the upper half: those in b. */
static INLINE floats NAME(pairs)(floats a, floats b)
{
#if defined(__clang__)
    return __builtin_shufflevector(a, b, LANE_LIST(0, EVEN)) + __builtin_shufflevector(a, b, LANE_LIST(1, EVEN));
#else
    return __builtin_shuffle(a, b, (ints){LANE_LIST(0, EVEN)}) + __builtin_shuffle(a, b, (ints){LANE_LIST(1, EVEN)});
#endif
}

/* The sums of TILE vectors, in order. */
static INLINE void NAME(sums)(floats *parts, float *sums)
{
    UNROLL(TILE / VECTOR)
    for (size_t first = 0; first < TILE; first += VECTOR) {
        floats *part = parts + first;
        UNROLL(4)
        for (size_t left = VECTOR / 2; left > 0; left /= 2)
            UNROLL(VECTOR / 2)
            for (size_t k = 0; k < left; k++)
                part[k] = NAME(pairs)(part[2 * k], part[2 * k + 1]);
        *(floats *)(sums + first) = part[0];
    }
}

/* Scores of `count` tokens against `heads` queries: score[head][token] = q[head] . k[token]. */
static INLINE void NAME(score)(const float *q, const char *k, size_t count, size_t heads, size_t width, int dtype,
                               const char *next, float (*scores)[TILE])
{
    floats parts[HEADS][TILE];
    size_t row_bytes = width * ITEMSIZE[dtype];
    for (size_t t = 0; t < count; t++) {
        const char *row = k + t * row_bytes;
        floats dots[HEADS] = {0};
        PREFETCH(next + t * row_bytes, row_bytes);
        UNROLL(16)
        for (size_t i = 0; i < width; i += VECTOR) {
            floats key = NAME(load)(row, i, dtype);
            UNROLL(HEADS)
            for (size_t h = 0; h < heads; h++)
                dots[h] = MULTIPLY_ADD(*(const floats *)(q + h * width + i), key, dots[h]);
        }
        UNROLL(HEADS)
        for (size_t h = 0; h < heads; h++)
            parts[h][t] = dots[h];
    }
    for (size_t h = 0; h < heads; h++) {
        for (size_t t = count; t < TILE; t++)
            parts[h][t] = (floats){0};
        NAME(sums)(parts[h], scores[h]);
    }
}

/* One strip of `vectors` registers: acc[head] += p[head][token] * v[token], over `count` tokens. */
static INLINE void NAME(strip)(float *acc, float (*p)[TILE], const char *v, size_t count, size_t heads, size_t width,
                               size_t at, size_t vectors, int dtype)
{
    floats sums[HEADS][STRIP];
    UNROLL(HEADS)
    for (size_t h = 0; h < heads; h++)
        UNROLL(STRIP)
        for (size_t c = 0; c < vectors; c++)
            sums[h][c] = *(floats *)(acc + h * width + at + c * VECTOR);
    for (size_t t = 0; t < count; t++) {
        floats value[STRIP];
        UNROLL(STRIP)
        for (size_t c = 0; c < vectors; c++)
            value[c] = NAME(load)(v + t * width * ITEMSIZE[dtype], at + c * VECTOR, dtype);
        UNROLL(HEADS)
        for (size_t h = 0; h < heads; h++)
            UNROLL(STRIP)
            for (size_t c = 0; c < vectors; c++)
                sums[h][c] = MULTIPLY_ADD(NAME(spread)(p[h][t]), value[c], sums[h][c]);
    }
    UNROLL(HEADS)
    for (size_t h = 0; h < heads; h++)
        UNROLL(STRIP)
        for (size_t c = 0; c < vectors; c++)
            *(floats *)(acc + h * width + at + c * VECTOR) = sums[h][c];
}

static INLINE void NAME(accumulate)(float *acc, float (*p)[TILE], const char *v, size_t count, size_t heads,
                                    size_t width, int dtype, const char *next)
{
    size_t at = 0;
    PREFETCH(next, count * width * ITEMSIZE[dtype]);
    for (; at + STRIP * VECTOR <= width; at += STRIP * VECTOR)
        NAME(strip)(acc, p, v, count, heads, width, at, STRIP, dtype);
    for (; at < width; at += VECTOR)
        NAME(strip)(acc, p, v, count, heads, width, at, 1, dtype);
}

/* Online softmax over one tile (Milakov and Gimelshein, arXiv:1805.02867): scores become weights, sums follow. */
static INLINE void NAME(soften)(float (*scores)[TILE], size_t count, size_t heads, size_t width, float scale,
                                float *acc, float *top, float *sum)
{
    for (size_t h = 0; h < heads; h++) {
        floats s[TILE / VECTOR], peak = NAME(spread)(-INFINITY), total = {0};
        UNROLL(TILE / VECTOR)
        for (size_t k = 0; k < TILE / VECTOR; k++) {
            ints number = (ints){LANE_LIST(0, LANE)} + (int32_t)(k * VECTOR);
            floats all = *(floats *)(scores[h] + k * VECTOR) * scale;
            s[k] = NAME(choose)(number < (int32_t)count, all, NAME(spread)(-INFINITY));
            peak = NAME(choose)(s[k] > peak, s[k], peak);
        }
        float best = NAME(folded_max)(peak);
        if (best > top[h]) {
            float shrink = expf(top[h] - best);
            for (size_t i = 0; i < width; i += VECTOR)
                *(floats *)(acc + h * width + i) *= shrink;
            sum[h] *= shrink;
            top[h] = best;
        }
        UNROLL(TILE / VECTOR)
        for (size_t k = 0; k < TILE / VECTOR; k++) {
            floats weight = NAME(exponential)(s[k] - top[h]);
            *(floats *)(scores[h] + k * VECTOR) = weight;
            total += weight;
        }
        sum[h] += NAME(folded_sum)(total);
    }
}

/* The tokens [first, last) of one sequence and KV head, against `heads` of its queries (at most HEADS). */
static INLINE void NAME(walk)(const attend_t *a, const int32_t *blocks, size_t head, size_t first, size_t last,
                              const float *q, size_t heads, size_t width, int dtype, float *acc, float *top,
                              float *sum)
{
    size_t row_bytes = width * ITEMSIZE[dtype], size = a->block_size;
    const char *plane = a->pool + head * size * row_bytes, *here = NULL;
    for (size_t token = first, count; token < last; token += count) {
        size_t inside = token % size, after;
        here = here ? here : plane + (size_t)blocks[token / size] * a->block_bytes + inside * row_bytes;
        count = MIN(MIN(TILE, size - inside), last - token);
        after = token + count;
        const char *next = after >= last       ? here
                           : after % size != 0 ? here + count * row_bytes
                                               : plane + (size_t)blocks[after / size] * a->block_bytes;
        float scores[HEADS][TILE];
        NAME(score)(q, here, count, heads, width, dtype, next, scores);
        NAME(soften)(scores, count, heads, width, a->scale, acc, top, sum);
        NAME(accumulate)(acc, scores, here + a->plane_bytes, count, heads, width, dtype, next + a->plane_bytes);
        here = next;
    }
}

#define WALK(heads, width, dtype)                                                                                      \
    NAME(walk)(a, blocks, head, first, last, q, heads, width, dtype, acc, top, sum);                                   \
    break

#define WALKS(heads)                                                                                                   \
    case heads:                                                                                                        \
        switch (a->width * DTYPES + a->dtype) {                                                                        \
        case 64 * DTYPES + FLOAT32:                                                                                    \
            WALK(heads, 64, FLOAT32);                                                                                  \
        case 64 * DTYPES + BFLOAT16:                                                                                   \
            WALK(heads, 64, BFLOAT16);                                                                                 \
        case 128 * DTYPES + FLOAT32:                                                                                   \
            WALK(heads, 128, FLOAT32);                                                                                 \
        case 128 * DTYPES + BFLOAT16:                                                                                  \
            WALK(heads, 128, BFLOAT16);                                                                                \
        default:                                                                                                       \
            if (a->dtype == BFLOAT16)                                                                                  \
                NAME(walk)(a, blocks, head, first, last, q, heads, a->width, BFLOAT16, acc, top, sum);                 \
            else                                                                                                       \
                NAME(walk)(a, blocks, head, first, last, q, heads, a->width, FLOAT32, acc, top, sum);                  \
        }                                                                                                              \
        break

static __attribute__((noinline)) void NAME(walk_any)(const attend_t *a, const int32_t *blocks, size_t head,
                                                     size_t first, size_t last, const float *q, size_t heads,
                                                     float *acc, float *top, float *sum)
{
    switch (heads) {
        WALKS(1);
        WALKS(2);
        WALKS(3);
        WALKS(4);
    }
}

/* One piece of one sequence's context, for one KV head: into the result, or into its partial where there are more. */
static void NAME(attend_piece)(const attend_t *a, size_t piece, size_t head)
{
    size_t row = (size_t)a->piece_rows[piece], length = (size_t)a->lengths[row], width = a->width;
    size_t first = (size_t)a->piece_starts[piece], last = MIN(first + a->piece_tokens, length);
    size_t visible = a->window && a->window < length ? length - a->window : 0;
    const int32_t *blocks = a->blocks + a->tables[row];
    const char *queries = a->q + (size_t)a->rows[row] * a->q_bytes + head * a->group * width * ITEMSIZE[a->dtype];
    for (size_t at = 0; at < a->group; at += HEADS) {
        size_t heads = MIN(HEADS, a->group - at);
        float q[HEADS * MAX_WIDTH], acc[HEADS * MAX_WIDTH], top[HEADS], sum[HEADS];
        for (size_t i = 0; i < heads * width; i += VECTOR) {
            *(floats *)(q + i) = NAME(load)(queries, at * width + i, a->dtype);
            *(floats *)(acc + i) = (floats){0};
        }
        for (size_t h = 0; h < heads; h++)
            top[h] = -INFINITY, sum[h] = 0.0f;
        if (last > visible)
            NAME(walk_any)(a, blocks, head, first < visible ? visible : first, last, q, heads, acc, top, sum);
        float *partial = a->partials + ((piece * a->kv_heads + head) * a->group + at) * (width + 2);
        for (size_t h = 0; h < heads; h++, partial += width + 2) {
            memcpy(partial, acc + h * width, width * sizeof(float));
            partial[width] = top[h];
            partial[width + 1] = sum[h];
        }
    }
}

/* The pieces of one query head become one row of the result. */
static void NAME(attend_merge)(const attend_t *a, size_t row, size_t head)
{
    size_t width = a->width, heads = a->kv_heads * a->group, stride = heads * (width + 2);
    size_t first = (size_t)a->first_pieces[row], last = (size_t)a->first_pieces[row + 1];
    const float *base = a->partials + head * (width + 2);
    float best = -INFINITY, sum = 0.0f, acc[MAX_WIDTH] = {0};
    for (size_t piece = first; piece < last; piece++)
        best = base[piece * stride + width] > best ? base[piece * stride + width] : best;
    for (size_t piece = first; piece < last; piece++) {
        const float *partial = base + piece * stride;
        float weight = expf(partial[width] - best);
        sum += partial[width + 1] * weight;
        for (size_t i = 0; i < width; i += VECTOR)
            *(floats *)(acc + i) += *(const floats *)(partial + i) * weight;
    }
    char *out = a->out + ((size_t)a->rows[row] * heads + head) * width * ITEMSIZE[a->dtype];
    for (size_t i = 0; i < width; i += VECTOR)
        NAME(store)(out, i, *(floats *)(acc + i) * (1.0f / sum), a->dtype);
}

/* ---- between the matrix products ------------------------------------------------------------------------------ */

/* RMS norm of one row; with `change`, x += change first. Squares are summed in LANES lanes on every level. */
static INLINE void NAME(norm_as)(const norm_t *n, char *x, const char *change, char *out, int dtype)
{
    floats squares[LANES / VECTOR] = {0};
    for (size_t i = 0; i < n->width; i += LANES)
        for (size_t k = 0; k < LANES / VECTOR; k++) {
            size_t at = i + k * VECTOR;
            floats value = NAME(load)(x, at, dtype);
            if (change) {
                value = NAME(rounded)(value + NAME(load)(change, at, dtype), dtype);
                NAME(store)(x, at, value, dtype);
            }
            squares[k] += value * value;
        }
    float lanes[LANES];
    memcpy(lanes, squares, sizeof lanes);
    for (size_t half = LANES / 2; half > 0; half /= 2)
        for (size_t j = 0; j < half; j++)
            lanes[j] += lanes[j + half];
    float factor = 1.0f / sqrtf(lanes[0] / (float)n->width + n->eps);
    for (size_t i = 0; i < n->width; i += VECTOR) {
        floats value = NAME(rounded)(NAME(load)(x, i, dtype) * factor, dtype);
        NAME(store)(out, i, value * NAME(load)(n->weight, i, dtype), dtype);
    }
}

static void NAME(norm)(const norm_t *n, size_t row)
{
    size_t bytes = n->width * ITEMSIZE[n->dtype];
    char *x = n->x + row / n->inner * n->x_bytes + row % n->inner * bytes, *out = n->out + row * bytes;
    const char *change = n->change ? n->change + row * bytes : NULL;
    if (n->dtype == BFLOAT16)
        NAME(norm_as)(n, x, change, out, BFLOAT16);
    else
        NAME(norm_as)(n, x, change, out, FLOAT32);
}

static INLINE void NAME(turn_as)(char *x, const char *cos, const char *sin, size_t heads, size_t width, int dtype)
{
    size_t half = width / 2;
    for (size_t h = 0; h < heads; h++, x += width * ITEMSIZE[dtype])
        for (size_t i = 0; i < half; i += VECTOR) {
            floats low = NAME(load)(x, i, dtype), high = NAME(load)(x, half + i, dtype);
            floats a = NAME(rounded)(low * NAME(load)(cos, i, dtype), dtype);
            floats b = NAME(rounded)(high * NAME(load)(sin, i, dtype), dtype);
            floats c = NAME(rounded)(high * NAME(load)(cos, half + i, dtype), dtype);
            floats d = NAME(rounded)(low * NAME(load)(sin, half + i, dtype), dtype);
            NAME(store)(x, i, a + b, dtype);
            NAME(store)(x, half + i, c + d, dtype);
        }
}

static void NAME(turn)(const turn_t *t, size_t row)
{
    size_t bytes = t->width * ITEMSIZE[t->dtype];
    char *x = t->x + row * t->x_bytes;
    if (t->dtype == BFLOAT16)
        NAME(turn_as)(x, t->cos + row * bytes, t->sin + row * bytes, t->heads, t->width, BFLOAT16);
    else
        NAME(turn_as)(x, t->cos + row * bytes, t->sin + row * bytes, t->heads, t->width, FLOAT32);
}

static INLINE void NAME(gate_as)(const char *gate, const char *up, char *out, size_t width, int dtype)
{
    for (size_t i = 0; i < width; i += VECTOR) {
        floats x = NAME(load)(gate, i, dtype);
        /* Further down the quotient is as good as 0, and what divides it no longer grows. */
        floats held = AT_LEAST(x, NAME(spread)(-88.3f));
        floats silu = NAME(rounded)(held / (1.0f + NAME(exponential)(-x)), dtype);
        NAME(store)(out, i, silu * NAME(load)(up, i, dtype), dtype);
    }
}

static void NAME(gate)(const gate_t *g, size_t row)
{
    size_t bytes = g->width * ITEMSIZE[g->dtype];
    const char *x = g->x + row * 2 * bytes;
    if (g->dtype == BFLOAT16)
        NAME(gate_as)(x, x + bytes, g->out + row * bytes, g->width, BFLOAT16);
    else
        NAME(gate_as)(x, x + bytes, g->out + row * bytes, g->width, FLOAT32);
}

#undef DOWN
#undef WALKS
#undef WALK
#undef halves
#undef words
#undef ints
#undef floats
#undef LANE_LIST
#undef NAME
#undef LISTS
#undef LISTS_
#undef PASTE
#undef PASTE_
