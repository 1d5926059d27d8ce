/* What the kernels share: sixteen lanes, and functions that must be inlined.

   Built-in functions (vload16, exp, fma) are avoided in loops: some implementations compile them as
   calls, which spill every vector register. */

typedef float16 lanes __attribute__((aligned(4)));  /* sixteen floats at any float's address */

#define LANES 16
#define LOAD(p) (*(__global const lanes *)(p))
#define STORE(p, v) (*(__global lanes *)(p) = (v))
#define NOTHING (-1e30f)  /* a score that no key has, finite: differences of it are numbers */

#define LOG2E 1.44269504088896341f
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f
#define ROUNDER 12582912.0f  /* 1.5 * 2^23: a float near it has its integer in the low bits */
#define EXP_LARGEST 88.0f
#define EXP_SMALLEST -87.0f

/* exp by range reduction and the Taylor polynomial of degree 7 on |r| <= ln(2)/2: below 2 ulp.
   Arguments outside of [-87, 88] give the value at the border. */
#define EXP_BODY(TYPE, AS_INT, AS_FLOAT)                                                           \
    x = x > EXP_LARGEST ? (TYPE)(EXP_LARGEST) : x;                                                 \
    x = x < EXP_SMALLEST ? (TYPE)(EXP_SMALLEST) : x;                                               \
    TYPE shifted = x * LOG2E + ROUNDER;                                                            \
    TYPE n = shifted - ROUNDER;                                                                    \
    TYPE r = (x - n * LN2_HIGH) - n * LN2_LOW;                                                     \
    TYPE p = r * 1.98412698e-4f + 1.38888889e-3f;                                                  \
    p = p * r + 8.33333333e-3f;                                                                    \
    p = p * r + 4.16666667e-2f;                                                                    \
    p = p * r + 1.66666667e-1f;                                                                    \
    p = p * r + 0.5f;                                                                              \
    p = p * (r * r) + r + 1.0f;                                                                    \
    return AS_FLOAT(AS_INT(p) + (AS_INT(shifted) << 23))

static inline float16 exp_lanes(float16 x) { EXP_BODY(float16, as_int16, as_float16); }
static inline float exp_one(float x) { EXP_BODY(float, as_int, as_float); }

static inline float16 tanh_lanes(float16 x) { return 1.0f - 2.0f / (exp_lanes(2.0f * x) + 1.0f); }
static inline float tanh_one(float x) { return 1.0f - 2.0f / (exp_one(2.0f * x) + 1.0f); }

static inline float16 silu_lanes(float16 x) { return x / (1.0f + exp_lanes(-x)); }
static inline float silu_one(float x) { return x / (1.0f + exp_one(-x)); }

static inline float sum_of(float16 v) {
    float8 a = v.lo + v.hi;
    float4 b = a.lo + a.hi;
    float2 c = b.lo + b.hi;
    return c.x + c.y;
}

static inline float largest_of(float16 v) {
    float8 a = v.lo > v.hi ? v.lo : v.hi;
    float4 b = a.lo > a.hi ? a.lo : a.hi;
    float2 c = b.lo > b.hi ? b.lo : b.hi;
    return c.x > c.y ? c.x : c.y;
}
