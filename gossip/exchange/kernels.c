/* The arithmetic of a round in int4: encode, measure and step, each in one pass over a parameter's memory.

   Optional: gossip/exchange/codec.py, swap.py and gossip/rounds/outer_optimiser.py do the same in torch, and
   gossip/exchange/kernels.py says which form is in use. What `encode` and `step` write has the bits of torch's path, on
   every machine: each operation is rounded by itself (-ffp-contract=off, never -ffast-math), in the same order. Sums run
   in LANES places whatever the machine's vectors are, so they too are the same everywhere.

   A parameter of n values has h = (n + 1) / 2 bytes of codes. Byte i holds value i in its low half, value h + i in its
   high half; the last high half of an odd n is zero. One's own weights are `base` and, on top of it, `difference`, which is
   bfloat16, or NULL where nothing is on top. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256 /* values worked on at a time: they stay in the first cache */
#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef struct { double place[LANES]; } Sum;

/* The checksum of this file, by which Python tells whether the library was built from it. */
const uint32_t kernels_source = KERNELS_SOURCE;

INLINE float from_bfloat16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint16_t to_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest_even);
}

/* The number of steps nearest to `steps` that is congruent to a code mod 16. */
INLINE float nearest(float steps, int code)
{
    float least = (float)code;
    return least + 16.0f * rintf((steps - least) * 0.0625f);
}

INLINE ptrdiff_t values_in(ptrdiff_t size, ptrdiff_t at)
{
    return size - at < BLOCK ? (size > at ? size - at : 0) : BLOCK;
}

/* One's own weights. */
INLINE void sum_up(float *restrict own, const float *restrict base, const uint16_t *restrict difference,
                   ptrdiff_t count)
{
    if (difference)
        for (ptrdiff_t i = 0; i < count; i++)
            own[i] = from_bfloat16(difference[i]) + base[i];
    else
        memcpy(own, base, (size_t)count * sizeof *own);
}

/* Add the products of two blocks, which are zero beyond their values. */
INLINE void add_products(Sum *sum, const float *a, const float *b)
{
    Lanes block = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        Lanes x, y;
        memcpy(&x, a + i, sizeof x);
        memcpy(&y, b + i, sizeof y);
        block += x * y;
    }
    for (int lane = 0; lane < LANES; lane++)
        sum->place[lane] += (double)block[lane];
}

INLINE double total(const Sum *sum)
{
    double all = 0.0;
    for (int lane = 0; lane < LANES; lane++)
        all += sum->place[lane];
    return all;
}

/* Write the codes of n values; return their sum of squares. */
INLINE double encode_any(const float *base, const uint16_t *difference, int64_t n, double step,
                         uint8_t *restrict codes)
{
    float inverse = (float)(1.0 / step);
    ptrdiff_t half = (ptrdiff_t)(n + 1) / 2;
    Sum squares = {{0}};
    for (ptrdiff_t at = 0; at < half; at += BLOCK)
        for (int high = 0; high < 2; high++) {
            ptrdiff_t first = high ? half + at : at, count = values_in(high ? (ptrdiff_t)n - half : half, at);
            float own[BLOCK];
            if (count < BLOCK)
                memset(own, 0, sizeof own);
            sum_up(own, base + first, difference ? difference + first : NULL, count);
            add_products(&squares, own, own);
            for (ptrdiff_t i = 0; i < count; i++) {
                float whole = rintf(own[i] * inverse);
                /* Beyond 2^28 float32 holds multiples of 16 alone. */
                int code = (int)(fabsf(whole) < 0x1p28f ? whole : 0.0f) & 15;
                codes[at + i] = (uint8_t)(high ? codes[at + i] | code << 4 : code);
            }
        }
    return total(&squares);
}

/* Add to five sums over n values, of our own, of the way from them to what the partner has sent, and of what we have
   learned, from the slow to the fast weights: way^2, learned^2, learned * way, own^2, own * way. */
INLINE void measure_any(const float *base, const uint16_t *difference, const uint16_t *learned, int64_t n, double step,
                        const uint8_t *codes, double *sums)
{
    float inverse = (float)(1.0 / step), size = (float)step;
    ptrdiff_t half = (ptrdiff_t)(n + 1) / 2;
    Sum apart = {{0}}, learning = {{0}}, along = {{0}}, ours = {{0}}, across = {{0}};
    for (ptrdiff_t at = 0; at < half; at += BLOCK)
        for (int high = 0; high < 2; high++) {
            ptrdiff_t first = high ? half + at : at, count = values_in(high ? (ptrdiff_t)n - half : half, at);
            float own[BLOCK], way[BLOCK], move[BLOCK];
            if (count < BLOCK) {
                memset(own, 0, sizeof own);
                memset(way, 0, sizeof way);
                memset(move, 0, sizeof move);
            }
            sum_up(own, base + first, difference ? difference + first : NULL, count);
            for (ptrdiff_t i = 0; i < count; i++) {
                move[i] = from_bfloat16(learned[first + i]);
                way[i] = nearest(own[i] * inverse, codes[at + i] >> 4 * high & 15) * size - own[i];
            }
            add_products(&apart, way, way);
            add_products(&learning, move, move);
            add_products(&along, move, way);
            add_products(&ours, own, own);
            add_products(&across, own, way);
        }
    sums[0] += total(&apart);
    sums[1] += total(&learning);
    sums[2] += total(&along);
    sums[3] += total(&ours);
    sums[4] += total(&across);
}

typedef struct {
    float step, inverse, own_share, their_share, scale, alpha, beta;
} Rule;

/* Take an outer step on a block. `momentum`: of a rule that has one, else NULL. */
INLINE void step_block(float *restrict slow, uint16_t *restrict difference, float *restrict momentum,
                       const uint8_t *restrict codes, int shift, ptrdiff_t count, Rule rule)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        float steps = (from_bfloat16(difference[i]) + slow[i]) * rule.inverse;
        float own = rintf(steps) * rule.step, theirs = nearest(steps, codes[i] >> shift & 15) * rule.step;
        float mean = (own * rule.own_share + theirs * rule.their_share) * rule.scale;
        float moved = (slow[i] - mean) * rule.beta;
        if (momentum)
            momentum[i] = moved = momentum[i] * rule.alpha + moved;
        slow[i] -= moved;
        difference[i] = to_bfloat16(slow[i] - own);
    }
}

/* Take an outer step with gamma = beta on n values: `difference`, that of the snapshot, becomes the correction. */
INLINE void step_any(float *slow, uint16_t *difference, float *momentum, int64_t n, double step, const uint8_t *codes,
                     double own_share, double their_share, double alpha, double beta)
{
    int even = own_share == 0.5 && their_share == 0.5; /* then half of the sum, as torch's path does */
    Rule rule = {
        .step = (float)step,
        .inverse = (float)(1.0 / step),
        .own_share = even ? 1.0f : (float)own_share,
        .their_share = even ? 1.0f : (float)their_share,
        .scale = even ? 0.5f : 1.0f,
        .alpha = (float)alpha,
        .beta = (float)beta,
    };
    ptrdiff_t half = (ptrdiff_t)(n + 1) / 2;
    for (ptrdiff_t at = 0; at < half; at += BLOCK)
        for (int high = 0; high < 2; high++) {
            ptrdiff_t first = high ? half + at : at, count = values_in(high ? (ptrdiff_t)n - half : half, at);
            if (momentum)
                step_block(slow + first, difference + first, momentum + first, codes + at, 4 * high, count, rule);
            else
                step_block(slow + first, difference + first, NULL, codes + at, 4 * high, count, rule);
        }
}

/* Each function once for each width of vectors that the machine may have. */
#if defined(__x86_64__) && !defined(KERNELS_PLAIN)
#define WIDE __attribute__((target("avx2")))
#define WIDEST __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define HAS_WIDE __builtin_cpu_supports("avx2")
#define HAS_WIDEST                                                                                                      \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&   \
     __builtin_cpu_supports("avx512vl"))
#else
#define WIDE
#define WIDEST
#define HAS_WIDE 0
#define HAS_WIDEST 0
#endif
#define WIDTHS(type, name, parameters, arguments)                                                                       \
    static type name##_plain parameters { return name##_any arguments; }                                                \
    WIDE static type name##_wide parameters { return name##_any arguments; }                                            \
    WIDEST static type name##_widest parameters { return name##_any arguments; }                                        \
    type kernels_##name parameters                                                                                      \
    {                                                                                                                   \
        return HAS_WIDEST ? name##_widest arguments : HAS_WIDE ? name##_wide arguments : name##_plain arguments;        \
    }

WIDTHS(double, encode, (const float *base, const uint16_t *difference, int64_t n, double step, uint8_t *codes),
       (base, difference, n, step, codes))
WIDTHS(void, measure,
       (const float *base, const uint16_t *difference, const uint16_t *learned, int64_t n, double step,
        const uint8_t *codes, double *sums),
       (base, difference, learned, n, step, codes, sums))
WIDTHS(void, step,
       (float *slow, uint16_t *difference, float *momentum, int64_t n, double step, const uint8_t *codes,
        double own_share, double their_share, double alpha, double beta),
       (slow, difference, momentum, n, step, codes, own_share, their_share, alpha, beta))
