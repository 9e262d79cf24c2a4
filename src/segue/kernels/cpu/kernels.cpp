// Kernels for CPUs with AVX512-BF16. All tensors are bfloat16 unless said otherwise, rows are contiguous.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {

using bf16 = uint16_t;
constexpr int kLanes = 32;          // bfloat16 numbers per register
constexpr int64_t kPackedRows = 5;  // rows of x from which packing them is worth it
constexpr int64_t kTileBytes = 64;  // of a row of a tile of AMX

// The tiles of AMX in a thread while it lives: eight tiles of 16 rows of 64 bytes. Without `on` it does
// nothing.
class TileSession {
   public:
    explicit TileSession(bool on) : on_(on) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int i = 0; i < 8; i++) shapes.row_bytes[i] = kTileBytes, shapes.rows[i] = 16;
        asm volatile("" ::"r"(&shapes) : "memory");  // the compiler takes it that only a part is read
        if (on_) _tile_loadconfig(&shapes);
    }
    ~TileSession() {
        if (on_) _tile_release();
    }
    TileSession(const TileSession&) = delete;
    TileSession& operator=(const TileSession&) = delete;

   private:
    bool on_;
};

// Loads of tiles read memory that the compiler does not know of: what is written before has to be there.
inline void finish_stores() { asm volatile("" ::: "memory"); }

inline __m512bh load_bf16(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline __m512bh load_bf16(const bf16* p, __mmask32 mask) {
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
}
inline __m512 widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline __m512 load_float(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline __m512 load_float(const bf16* p, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, p)); }
inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline __mmask16 first16(int64_t n) { return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1); }
inline __mmask32 first32(int64_t n) { return n >= 32 ? 0xffffffffu : (__mmask32)((1u << n) - 1); }

// Returns e**x; x may be -inf. Relative error below 3e-7.
inline __m512 exp_ps(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // in this order, NaN stays NaN
    __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

inline __m512 silu(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// Returns the sums of the 16 registers' lanes: lane i is the sum of a[i].
inline __m512 sums(const __m512* a) {
    __m512 b[8], c[4], d[2];
    for (int i = 0; i < 8; i++)
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                             _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 2; i++)
        d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xdd));
}

// Returns the products of M rows of x by N rows of the weight (M * N <= 16): lane m * N + n.
template <int M, int N>
inline __m512 products(const bf16* x, int64_t x_stride, const bf16* w, int64_t w_stride, int64_t depth) {
    __m512 acc[16];
    for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) {
        __m512bh xs[M];
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) xs[m] = load_bf16(x + m * x_stride + k);
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            __m512bh v = load_bf16(w + n * w_stride + k);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) acc[m * N + n] = _mm512_dpbf16_ps(acc[m * N + n], xs[m], v);
        }
    }
    if (k < depth) {
        __mmask32 mask = first32(depth - k);
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            __m512bh v = load_bf16(w + n * w_stride + k, mask);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++)
                acc[m * N + n] = _mm512_dpbf16_ps(acc[m * N + n], load_bf16(x + m * x_stride + k, mask), v);
        }
    }
    return sums(acc);
}

struct Gemm {
    const bf16* x;
    const bf16* w;
    const bf16* bias;
    void* out;
    int64_t rows, size, depth;  // size: columns of the result
    bool wide, gated, tiles;
};

template <int M, int N>
inline void block(const Gemm& g, int64_t n) {
    __m512 y = products<M, N>(g.x, g.depth, g.w + n * g.depth, g.depth, g.depth);
    if (g.gated)
        y = _mm512_mul_ps(silu(y),
                          products<M, N>(g.x, g.depth, g.w + (g.size + n) * g.depth, g.depth, g.depth));
    if (g.bias) {
        alignas(64) float b[16] = {};
        for (int i = 0; i < M * N; i++)
            b[i] =
                _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32((uint32_t)g.bias[n + i % N] << 16)));
        y = _mm512_add_ps(y, _mm512_load_ps(b));
    }
    if (g.wide) {
        alignas(64) float r[16];
        _mm512_store_ps(r, y);
        for (int i = 0; i < M; i++) memcpy((float*)g.out + i * g.size + n, r + i * N, N * sizeof(float));
    } else {
        alignas(32) bf16 r[16];
        _mm256_store_si256((__m256i*)r, narrow(y));
        for (int i = 0; i < M; i++) memcpy((bf16*)g.out + i * g.size + n, r + i * N, N * sizeof(bf16));
    }
}

inline void column(const Gemm& g, int64_t n) {  // up to four rows of one column
    switch (g.rows) {
        case 4:
            block<4, 1>(g, n);
            break;
        case 3:
            block<3, 1>(g, n);
            break;
        case 2:
            block<2, 1>(g, n);
            break;
        case 1:
            block<1, 1>(g, n);
            break;
    }
}

// Packs up to 16 rows of `size` numbers as columns of pairs: [size / 2][16][2], with zeros for missing rows,
// and up to a size that is a multiple of 32.
inline void pack_columns(const bf16* const* rows, int64_t count, bf16* out, int64_t size) {
    for (int64_t d = 0; d < size; d += kLanes) {
        __mmask32 mask = first32(size - d);
        __m512i r[16], t[16];
        for (int i = 0; i < 16; i++)
            r[i] = i < count ? (__m512i)load_bf16(rows[i] + d, mask) : _mm512_setzero_si512();
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        }
        for (int i = 0; i < 16; i += 4)
            for (int j = 0; j < 2; j++) {
                r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
                r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
            }
        for (int j = 0; j < 4;
             j++) {  // the quarters of r[j], r[4 + j], r[8 + j] and r[12 + j] belong to four pairs
            __m512i even = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88),
                    odd = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
            __m512i even2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88),
                    odd2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
            bf16* to = out + d / 2 * 32 + j * 32;
            _mm512_storeu_si512(to, _mm512_shuffle_i32x4(even, even2, 0x88));
            _mm512_storeu_si512(to + 4 * 32, _mm512_shuffle_i32x4(odd, odd2, 0x88));
            _mm512_storeu_si512(to + 8 * 32, _mm512_shuffle_i32x4(even, even2, 0xdd));
            _mm512_storeu_si512(to + 12 * 32, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
        }
    }
}

constexpr int64_t kGroup = 128;  // rows of x that a thread takes at a time, with one panel of the weight

// Rows of x that are packed at a time: as many as stay in a core's L2 cache, or where that leaves many
// threads without work, more.
inline int64_t rows_at_once(int64_t depth, int64_t panels) {
    int64_t rows = std::clamp<int64_t>(655360 / (depth * sizeof(bf16)) / 32 * 32, kGroup, 512);
    return panels * (rows / kGroup) < 4 * omp_get_max_threads() ? 512 : rows;
}

// Turns rows into columns.
inline void transpose(__m512* r) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d low = _mm512_castps_pd(t[i + j]), high = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 4; j++) {
        r[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd);
        r[j + 4] = _mm512_shuffle_f32x4(t[j + 4], t[j + 12], 0x88);
        r[j + 12] = _mm512_shuffle_f32x4(t[j + 4], t[j + 12], 0xdd);
    }
}

// Writes results of row `m` of x, of 16 columns from `n` on.
inline void write(const Gemm& g, __m512 y, int64_t m, int64_t n) {
    __mmask16 mask = first16(g.size - n);
    if (g.bias) y = _mm512_add_ps(y, load_float(g.bias + n, mask));
    int64_t at = m * g.size + n;
    if (g.wide)
        _mm512_mask_storeu_ps((float*)g.out + at, mask, y);
    else
        _mm256_mask_storeu_epi16((bf16*)g.out + at, mask, narrow(y));
}

// Writes results of 16 columns from `n` on, for `count` rows of x from `m` on; columns[i] is column i.
inline void write_columns(const Gemm& g, const float (*columns)[16], int64_t m, int64_t count, int64_t n) {
    __m512 y[16];
    for (int i = 0; i < 16; i++) y[i] = _mm512_load_ps(columns[i]);
    transpose(y);
    for (int64_t i = 0; i < count; i++) write(g, y[i], m + i, n);
}

// The rows of the weight that a block of columns needs, 32 in all: two times 16. They are where they are, or
// copied with zeros, where 16 and 32 do not divide the weight.
struct Panel {
    const bf16 *first, *second;
    int64_t stride, ahead;
    Panel(const Gemm& g, int64_t n, std::vector<bf16>& copy) {
        second = g.w + (n + (g.gated ? g.size : 16)) * g.depth;
        first = g.w + n * g.depth;
        stride = g.depth;
        ahead = g.gated ? 16 : 32;
        int64_t there = std::min<int64_t>(16, g.size - n),
                also = g.gated ? there : std::max<int64_t>(0, std::min<int64_t>(16, g.size - n - 16));
        if (there == 16 && also == 16 && g.depth % kLanes == 0) return;
        stride = (g.depth + kLanes - 1) / kLanes * kLanes;
        copy.assign(32 * stride, 0);
        for (int64_t r = 0; r < there; r++)
            memcpy(copy.data() + r * stride, first + r * g.depth, g.depth * sizeof(bf16));
        for (int64_t r = 0; r < also; r++)
            memcpy(copy.data() + (16 + r) * stride, second + r * g.depth, g.depth * sizeof(bf16));
        first = copy.data();
        second = first + 16 * stride;
    }
};

// Products of N rows of the weight and V times 16 packed rows of x, which are `x_stride` apart.
template <int N, int V>
inline void multiply_rows(const bf16* w, int64_t w_stride, const bf16* x, int64_t x_stride, int64_t pairs,
                          float (*sums)[16], int64_t sums_stride, int64_t ahead) {
    __m512 acc[N][V];
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) acc[n][v] = _mm512_setzero_ps();
    for (int64_t first = 0; first < pairs; first += 16) {
#pragma GCC unroll 16
        for (int n = 0; n < N; n++)
            _mm_prefetch((const char*)(w + (n + ahead) * w_stride + 2 * first), _MM_HINT_T0);
        for (int64_t p = first; p < first + 16; p++) {
            __m512bh columns[V];
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) columns[v] = load_bf16(x + p * kLanes + v * x_stride);
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) {
                int32_t two;
                memcpy(&two, w + n * w_stride + 2 * p, 4);
                __m512bh pair = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 2
                for (int v = 0; v < V; v++) acc[n][v] = _mm512_dpbf16_ps(acc[n][v], pair, columns[v]);
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) _mm512_store_ps(sums[n] + v * sums_stride, acc[n][v]);
}

// Products of 32 rows of the weight and 32 packed rows of x, or 16 if not `both`. Those of the first 16 rows
// of the weight and of x are sums[0]; those of the second 16 rows of the weight sums[1], of x sums[2] and
// [3].
inline void multiply_panel(const Panel& w, const bf16* x, int64_t steps, bool both, float (*sums)[16][16]) {
    for (int half = 0; half < 2; half++) {
        const bf16* rows = half ? w.second : w.first;
        if (both)
            for (int n = 0; n < 16; n += 8)
                multiply_rows<8, 2>(rows + n * w.stride, w.stride, x, steps * 512, steps * 16, sums[half] + n,
                                    512, w.ahead);
        else if (w.stride % 1024)
            multiply_rows<16, 1>(rows, w.stride, x, 0, steps * 16, sums[half], 0, w.ahead);
        else  // 16 rows would be in the same few places of the L1 cache
            for (int n = 0; n < 16; n += 8)
                multiply_rows<8, 1>(rows + n * w.stride, w.stride, x, 0, steps * 16, sums[half] + n, 0,
                                    w.ahead);
    }
}

// The same by tiles of AMX. With `fetch` the panel's successor is fetched meanwhile.
inline void multiply_panel_by_tiles(const Panel& w, const bf16* x, int64_t steps, bool both, bool fetch,
                                    float (*sums)[16][16]) {
    int64_t row_bytes = w.stride * sizeof(bf16);
    finish_stores();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps; s++) {
        const bf16 *first = w.first + s * kLanes, *second = w.second + s * kLanes;
        if (fetch)
            for (int i = 0; i < 16; i++) {
                _mm_prefetch((const char*)(first + (i + w.ahead) * w.stride), _MM_HINT_T0);
                _mm_prefetch((const char*)(second + (i + w.ahead) * w.stride), _MM_HINT_T0);
            }
        _tile_loadd(4, first, row_bytes);
        _tile_loadd(5, second, row_bytes);
        _tile_loadd(6, x + s * 512, kTileBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (!both) continue;
        _tile_loadd(7, x + (steps + s) * 512, kTileBytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0], kTileBytes);
    _tile_stored(1, sums[1], kTileBytes);
    if (!both) return;
    _tile_stored(2, sums[2], kTileBytes);
    _tile_stored(3, sums[3], kTileBytes);
}

// Transposes two matrices of 16 x 16 bfloat16 numbers, one in the lower halves of the registers and one in
// the upper ones.
inline void transpose_halves(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi16(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi32(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi32(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + 2 * j] = _mm512_unpacklo_epi64(r[i + j], r[i + j + 4]);
            t[i + 2 * j + 1] = _mm512_unpackhi_epi64(r[i + j], r[i + j + 4]);
        }
    __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
            odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for (int j = 0; j < 8; j++) {
        r[j] = _mm512_permutex2var_epi64(t[j], even, t[j + 8]);
        r[j + 8] = _mm512_permutex2var_epi64(t[j], odd, t[j + 8]);
    }
}

// Narrows two matrices of 16 columns with 16 numbers each; rows[r] gets row r of `first`, then that of
// `second`.
inline void narrow_rows(const float (*first)[16], const float (*second)[16], __m512i* rows) {
    for (int i = 0; i < 16; i++)
        rows[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(second[i]), _mm512_load_ps(first[i]));
    transpose_halves(rows);
}

// Adds the bias to a block's sums, of `count` rows of x.
inline void add_bias(const Gemm& g, float (*sums)[16][16], int64_t count, int64_t n) {
    for (int half = 0; half < 2; half++)
        for (int64_t i = 0; i < 16 && n + 16 * half + i < g.size; i++) {
            __m512 bias = widen(_mm256_set1_epi16((int16_t)g.bias[n + 16 * half + i]));
            for (int rows = 0; rows < (count > 16 ? 4 : 2); rows += 2) {
                float* at = sums[rows + half][i];
                _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), bias));
            }
        }
}

// Writes a block's results in bfloat16; for `sums` see `multiply_panel`, for the others `block_by_panel`.
inline void write_block(const Gemm& g, float (*sums)[16][16], int64_t m, int64_t count, int64_t n) {
    if (g.bias) add_bias(g, sums, count, n);
    bf16* out = (bf16*)g.out + m * g.size + n;
    __mmask32 mask = first32(g.size - n);
    __m512i rows[16];
    for (int64_t first = 0; first < count; first += 16, sums += 2, out += 16 * g.size) {
        narrow_rows(sums[0], sums[1], rows);
        for (int64_t r = 0; r < std::min<int64_t>(16, count - first); r++)
            _mm512_mask_storeu_epi16(out + r * g.size, mask, rows[r]);
    }
}

// The same for gates and what they gate, whose products with the rows of x become sums[0] and sums[1].
inline void write_gated_block(const Gemm& g, float (*sums)[16][16], int64_t m, int64_t count, int64_t n) {
    for (int half = 0; 16 * half < count; half++)
        for (int i = 0; i < 16; i++) {
            __m512 gate = _mm512_load_ps(sums[2 * half][i]), up = _mm512_load_ps(sums[2 * half + 1][i]);
            _mm512_store_ps(sums[half][i], _mm512_mul_ps(silu(gate), up));
        }
    bf16* out = (bf16*)g.out + m * g.size + n;
    __mmask16 mask = first16(g.size - n);
    __m512i rows[16];
    narrow_rows(sums[0], sums[1], rows);
    for (int64_t r = 0; r < std::min<int64_t>(16, count); r++)
        _mm256_mask_storeu_epi16(out + r * g.size, mask, _mm512_castsi512_si256(rows[r]));
    for (int64_t r = 16; r < count; r++)
        _mm256_mask_storeu_epi16(out + r * g.size, mask, _mm512_extracti64x4_epi64(rows[r - 16], 1));
}

// Rows `m` to `m + count - 1` (count <= 32), which are packed at `x`, by a panel of columns from `n` on.
inline void block_by_panel(const Gemm& g, const Panel& w, const bf16* x, int64_t m, int64_t count, int64_t n,
                           bool fetch) {
    alignas(64) float sums[4][16][16];
    int64_t steps = (g.depth + kLanes - 1) / kLanes;
    if (g.tiles)
        multiply_panel_by_tiles(w, x, steps, count > 16, fetch, sums);
    else
        multiply_panel(w, x, steps, count > 16, sums);
    if (g.gated) return write_gated_block(g, sums, m, count, n);
    if (!g.wide) return write_block(g, sums, m, count, n);
    for (int64_t half = 0; 16 * half < count; half++) {
        int64_t rows = std::min<int64_t>(16, count - 16 * half);
        write_columns(g, sums[2 * half], m + 16 * half, rows, n);
        if (n + 16 < g.size) write_columns(g, sums[2 * half + 1], m + 16 * half, rows, n + 16);
    }
}

// Returns room for `size` numbers in `buffer`, from the beginning of a line of the cache on.
inline bf16* room(std::vector<bf16>& buffer, int64_t size) {
    if ((int64_t)buffer.size() < size + kLanes) buffer.resize(size + kLanes);
    return (bf16*)(((uintptr_t)buffer.data() + 63) / 64 * 64);
}

// Each number of the weight is multiplied by 16 rows of x, which are packed first. It stays where it is.
inline void gemm_by_panels(const Gemm& g) {
    int64_t steps = (g.depth + kLanes - 1) / kLanes, per = g.gated ? 16 : 32;
    int64_t panels = (g.size + per - 1) / per, at_once = rows_at_once(g.depth, panels);
    static thread_local std::vector<bf16> columns;  // of the thread that calls; all share them
    bf16* packed = room(columns, std::min(at_once, (g.rows + 15) / 16 * 16) * steps * kLanes);
#pragma omp parallel
    {
        std::vector<bf16> copy;
        TileSession session(g.tiles);
        for (int64_t first = 0; first < g.rows; first += at_once) {
            int64_t count = std::min(at_once, g.rows - first);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < count; i += 16) {
                const bf16* rows[16];
                int64_t here = std::min<int64_t>(16, count - i);
                for (int64_t j = 0; j < here; j++) rows[j] = g.x + (first + i + j) * g.depth;
                pack_columns(rows, here, packed + i * steps * kLanes, g.depth);
            }
            int64_t groups = (count + kGroup - 1) / kGroup;
#pragma omp for schedule(static)
            for (int64_t work = 0; work < panels * groups; work++) {
                int64_t n = work / groups * per, from = work % groups * kGroup;
                Panel panel(g, n, copy);
                for (int64_t m = from; m < std::min(from + kGroup, count); m += 32)
                    block_by_panel(g, panel, packed + m * steps * kLanes, first + m,
                                   std::min<int64_t>(32, count - m), n, m == 0);
            }
        }
    }
}

// All M rows of x, which are `x_stride` apart and padded as the panel's are, by a panel of columns from `n`
// on. Rows of the weight are packed, in registers, and not those of x: an element is added up in the order of
// `gemm_by_panels` without tiles.
template <int M>
inline void few_by_panel(const Gemm& g, const Panel& w, const bf16* x, int64_t x_stride, int64_t n) {
    __m512 acc[2][M];
    for (int half = 0; half < 2; half++)
        for (int m = 0; m < M; m++) acc[half][m] = _mm512_setzero_ps();
    for (int64_t k = 0; k < g.depth; k += kLanes)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const bf16* rows = (half ? w.second : w.first) + k;
            __m512 pairs[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                pairs[i] = _mm512_loadu_ps(rows + i * w.stride);
                _mm_prefetch((const char*)(rows + (i + w.ahead) * w.stride), _MM_HINT_T0);
            }
            transpose(pairs);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) {
                    int32_t two;
                    memcpy(&two, x + m * x_stride + k + 2 * i, 4);
                    __m512bh pair = (__m512bh)_mm512_set1_epi32(two);
                    acc[half][m] = _mm512_dpbf16_ps(acc[half][m], pair, (__m512bh)pairs[i]);
                }
        }
    for (int m = 0; m < M; m++) {
        if (g.gated) {
            write(g, _mm512_mul_ps(silu(acc[0][m]), acc[1][m]), m, n);
            continue;
        }
        write(g, acc[0][m], m, n);
        if (n + 16 < g.size) write(g, acc[1][m], m, n + 16);
    }
}

// Up to four rows of x, with the bits of `gemm_by_panels` without tiles. For long rows of the weight this is
// slower than `gemm_of_few_rows`.
inline void gemm_of_few_rows_invariant(const Gemm& g) {
    int64_t stride = (g.depth + kLanes - 1) / kLanes * kLanes, per = g.gated ? 16 : 32;
    int64_t panels = (g.size + per - 1) / per;
    std::vector<bf16> padded;
    const bf16* x = g.x;
    if (stride != g.depth) {
        padded.resize(g.rows * stride);
        for (int64_t m = 0; m < g.rows; m++)
            memcpy(padded.data() + m * stride, g.x + m * g.depth, g.depth * sizeof(bf16));
        x = padded.data();
    }
#pragma omp parallel
    {
        std::vector<bf16> copy;
#pragma omp for schedule(static)
        for (int64_t work = 0; work < panels; work++) {
            int64_t n = work * per;
            Panel panel(g, n, copy);
            switch (g.rows) {
                case 1:
                    few_by_panel<1>(g, panel, x, stride, n);
                    break;
                case 2:
                    few_by_panel<2>(g, panel, x, stride, n);
                    break;
                case 3:
                    few_by_panel<3>(g, panel, x, stride, n);
                    break;
                case 4:
                    few_by_panel<4>(g, panel, x, stride, n);
                    break;
            }
        }
    }
}

// Up to four rows of x, along which the lanes are.
inline void gemm_of_few_rows(const Gemm& g) {
    int64_t rows = g.rows, size = g.size, depth = g.depth;
    int64_t per = std::max<int64_t>(
        16, 24576 / (2 * depth) / 16 * 16);  // columns per block: their weights stay in the L1 cache
    int64_t blocks = (size + per - 1) / per;
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        int64_t end = std::min(size, (b + 1) * per);
        int64_t n = b * per;
        if (rows == 1) {
            if (depth % 1024 == 0)
                for (; n + 8 <= end; n += 8) block<1, 8>(g, n);
            for (; n + 16 <= end; n += 16) block<1, 16>(g, n);
        } else if (rows == 2) {
            for (; n + 8 <= end; n += 8) block<2, 8>(g, n);
        } else {
            for (; n + 4 <= end; n += 4) rows == 3 ? block<3, 4>(g, n) : block<4, 4>(g, n);
        }
        for (; n < end; n++) column(g, n);
    }
}

}  // namespace

// With `invariant` a row has the same bits in any batch. `tiles`: this process may use AMX.
extern "C" void gemm(const bf16* x, const bf16* w, const bf16* bias, void* out, int64_t rows, int64_t size,
                     int64_t depth, int wide, int gated, int invariant, int tiles) {
    Gemm g{x, w, bias, out, rows, size, depth, wide != 0, gated != 0, tiles != 0};
    if (rows >= kPackedRows || (rows && invariant && tiles))
        gemm_by_panels(g);
    else if (rows && invariant)
        gemm_of_few_rows_invariant(g);
    else if (rows)
        gemm_of_few_rows(g);
}

// ---- norms, rotary embedding, activation ----

extern "C" void add_rms_norm(const bf16* x, bf16* residual, const float* weight, bf16* out, int64_t rows,
                             int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows * size >= 16384)
    for (int64_t r = 0; r < rows; r++) {
        const bf16* xs = x + r * size;
        bf16* rs = residual ? residual + r * size : nullptr;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < size; i += 16) {
            __mmask16 mask = first16(size - i);
            __m512 v = load_float(xs + i, mask);
            if (rs) {
                __m256i sum = narrow(_mm512_add_ps(v, load_float(rs + i, mask)));
                _mm256_mask_storeu_epi16(rs + i, mask, sum);
                v = widen(sum);
            }
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        const bf16* total = rs ? rs : xs;
        __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / (float)size + eps));
        for (int64_t i = 0; i < size; i += 16) {
            __mmask16 mask = first16(size - i);
            __m512 v = _mm512_mul_ps(load_float(total + i, mask), scale);
            _mm256_mask_storeu_epi16(out + r * size + i, mask,
                                     narrow(_mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, weight + i))));
        }
    }
}

extern "C" void norm_rope_store(bf16* qkv, const float* weight, float eps, const bf16* cos, const bf16* sin,
                                const int64_t* rows, bf16* keys, bf16* values, int64_t tokens, int64_t heads,
                                int64_t kv_heads, int64_t dim) {
    int64_t width = (heads + 2 * kv_heads) * dim, half = dim / 2;
#pragma omp parallel for schedule(static) if (tokens >= 16)
    for (int64_t t = 0; t < tokens; t++) {
        const bf16 *c = cos + t * dim, *s = sin + t * dim;
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            bf16* x = qkv + t * width + h * dim;
            __m512 scale = _mm512_set1_ps(1.0f);
            if (weight) {
                __m512 squares = _mm512_setzero_ps();
                for (int64_t i = 0; i < dim; i += 16) {
                    __m512 v = load_float(x + i);
                    squares = _mm512_fmadd_ps(v, v, squares);
                }
                scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / (float)dim + eps));
            }
            for (int64_t i = 0; i < half; i += 16) {
                __m512 a = load_float(x + i), b = load_float(x + half + i);
                if (weight) {
                    a = _mm512_mul_ps(_mm512_mul_ps(a, scale), _mm512_loadu_ps(weight + h * dim + i));
                    b = _mm512_mul_ps(_mm512_mul_ps(b, scale), _mm512_loadu_ps(weight + h * dim + half + i));
                }
                __m512 y = _mm512_fmadd_ps(b, load_float(s + i), _mm512_mul_ps(a, load_float(c + i)));
                __m512 z =
                    _mm512_fmadd_ps(a, load_float(s + half + i), _mm512_mul_ps(b, load_float(c + half + i)));
                _mm256_storeu_si256((__m256i*)(x + i), narrow(y));
                _mm256_storeu_si256((__m256i*)(x + half + i), narrow(z));
            }
        }
        size_t bytes = kv_heads * dim * sizeof(bf16);
        memcpy(keys + rows[t] * kv_heads * dim, qkv + t * width + heads * dim, bytes);
        memcpy(values + rows[t] * kv_heads * dim, qkv + t * width + (heads + kv_heads) * dim, bytes);
    }
}

extern "C" void silu_mul(const bf16* gate_up, bf16* out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size >= 16384)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < size; i += 16) {
            __mmask16 mask = first16(size - i);
            __m512 y = silu(load_float(gate_up + 2 * r * size + i, mask));
            y = _mm512_mul_ps(y, load_float(gate_up + (2 * r + 1) * size + i, mask));
            _mm256_mask_storeu_epi16(out + r * size + i, mask, narrow(y));
        }
}

// ---- attention ----

namespace {

constexpr int64_t kChunk = 256;  // keys per item of work in decode

// acc[g][i] += sum over keys of weights[g][key] * values[key][first + 16 * i ...], for G heads and 64
// numbers.
template <int G>
inline void weigh(const bf16* const* rows, int64_t first, int64_t count, const float* weights, float* out,
                  int64_t dim, int vecs) {
    __m512 acc[G][4];
    for (int g = 0; g < G; g++)
        for (int i = 0; i < 4; i++) acc[g][i] = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j++) {
        const bf16* row = rows[j] + first;
        __m512 v[4];
        for (int i = 0; i < 4; i++) v[i] = i < vecs ? load_float(row + 16 * i) : _mm512_setzero_ps();
        for (int g = 0; g < G; g++) {
            __m512 p = _mm512_set1_ps(weights[g * kChunk + j]);
            for (int i = 0; i < 4; i++) acc[g][i] = _mm512_fmadd_ps(p, v[i], acc[g][i]);
        }
    }
    for (int g = 0; g < G; g++)
        for (int i = 0; i < vecs; i++) _mm512_storeu_ps(out + g * dim + first + 16 * i, acc[g][i]);
}

// Packs up to 16 values of one head as rows of pairs: [8][dim][2], with zeros for missing values.
inline void pack_values(const bf16* const* rows, int64_t count, bf16* out, int64_t dim) {
    alignas(64) bf16 order[32];
    for (int i = 0; i < 32; i++) order[i] = i / 2 + i % 2 * 32;
    __m512i low = _mm512_load_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t j = 0; j < 16; j += 2)
        for (int64_t d = 0; d < dim; d += kLanes) {
            __m512i a = j < count ? _mm512_loadu_si512(rows[j] + d) : _mm512_setzero_si512();
            __m512i b = j + 1 < count ? _mm512_loadu_si512(rows[j + 1] + d) : _mm512_setzero_si512();
            _mm512_storeu_si512(out + j * dim + 2 * d, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(out + j * dim + 2 * d + 32, _mm512_permutex2var_epi16(a, high, b));
        }
}

// Up to kChunk keys that the query heads of one key-value head attend to, and a thread's buffers for them.
struct Chunk {
    const bf16 *keys[kChunk], *values[kChunk];
    int64_t count, group, dim;
    std::vector<float> weights;  // per head and key: a score, then its exponential
    std::vector<bf16> narrowed;  // with tiles: the weights of 16 heads, 0 for those that do not exist
    std::unique_ptr<bf16[]> query, packed;  // with tiles: queries and values

    Chunk(int64_t group, int64_t dim, bool tiles) : group(group), dim(dim), weights(group * kChunk) {
        if (!tiles) return;
        narrowed.resize(16 * kChunk);
        query.reset(new bf16[16 * dim]);
        packed.reset(new bf16[kChunk * dim]);
    }

    void score(const bf16* q, float scale) {
        for (int64_t j = count; j < (count + 15) / 16 * 16; j++) keys[j] = keys[count - 1];
        for (int64_t j = 0; j < count; j += 16)
            for (int64_t g = 0; g < group; g++) {
                __m512 acc[16];
                for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
                for (int64_t d = 0; d < dim; d += kLanes) {
                    __m512bh x = load_bf16(q + g * dim + d);
#pragma GCC unroll 16
                    for (int i = 0; i < 16; i++)
                        acc[i] = _mm512_dpbf16_ps(acc[i], x, load_bf16(keys[j + i] + d));
                }
                set_scores(g, j, sums(acc), scale);
            }
    }

    // The same by tiles. 16 keys lie `stride` apart, the first one's number in the chunk is a multiple of 16.
    void score_by_tiles(const bf16* q, float scale, int64_t stride) {
        const bf16* heads[16];
        for (int64_t g = 0; g < group; g++) heads[g] = q + g * dim;
        pack_columns(heads, group, query.get(), dim);
        finish_stores();
        int64_t bytes = stride * sizeof(bf16);
        for (int64_t j = 0; j < count; j += 32) {
            alignas(64) float columns[2][16][16];
            bool both = j + 16 < count;
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t d = 0; d < dim; d += kLanes) {
                _tile_loadd(4, query.get() + d * 16, kTileBytes);
                _tile_loadd(5, keys[j] + d, bytes);
                _tile_dpbf16ps(0, 5, 4);
                if (!both) continue;
                _tile_loadd(6, keys[j + 16] + d, bytes);
                _tile_dpbf16ps(1, 6, 4);
            }
            _tile_stored(0, columns[0], kTileBytes);
            _tile_stored(1, columns[1], kTileBytes);
            for (int half = 0; half <= both; half++) {
                __m512 y[16];
                for (int i = 0; i < 16; i++) y[i] = _mm512_load_ps(columns[half][i]);
                transpose(y);
                for (int64_t g = 0; g < group; g++) set_scores(g, j + 16 * half, y[g], scale);
            }
        }
    }

    void set_scores(int64_t g, int64_t j, __m512 products, float scale) {
        __m512 s = _mm512_mul_ps(products, _mm512_set1_ps(scale));
        s = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), first16(count - j), s);
        _mm512_storeu_ps(weights.data() + g * kChunk + j, s);
    }

    // Turns scores into weights; `result` gets each head's maximum of the scores and sum of the weights.
    void soften(float* result) {
        for (int64_t g = 0; g < group; g++) {
            float* w = weights.data() + g * kChunk;
            __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
            for (int64_t j = 0; j < count; j += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(w + j));
            float m = _mm512_reduce_max_ps(most), shift = m == -INFINITY ? 0.0f : m;
            for (int64_t j = 0; j < count; j += 16) {
                __m512 e = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(w + j), _mm512_set1_ps(shift)));
                e = _mm512_maskz_mov_ps(first16(count - j), e);
                sum = _mm512_add_ps(sum, e);
                _mm512_storeu_ps(w + j, e);
            }
            result[2 * g] = m;
            result[2 * g + 1] = _mm512_reduce_add_ps(sum);
        }
    }

    // Sets the heads' sums of weighted values, [group, dim].
    void weigh_values(float* result) const {
        for (int64_t d = 0; d < dim; d += 64) {
            int vecs = (int)std::min<int64_t>(4, (dim - d) / 16);
            for (int64_t g = 0; g < group; g += 4) {
                const float* w = weights.data() + g * kChunk;
                float* o = result + g * dim;
                switch (std::min<int64_t>(4, group - g)) {
                    case 4:
                        weigh<4>(values, d, count, w, o, dim, vecs);
                        break;
                    case 3:
                        weigh<3>(values, d, count, w, o, dim, vecs);
                        break;
                    case 2:
                        weigh<2>(values, d, count, w, o, dim, vecs);
                        break;
                    case 1:
                        weigh<1>(values, d, count, w, o, dim, vecs);
                        break;
                }
            }
        }
    }

    // The same by tiles; dim is a multiple of 64.
    void weigh_values_by_tiles(float* result) {
        int64_t end = (count + 31) / 32 * 32;
        for (int64_t j = 0; j < end; j += 16) {
            pack_values(values + j, std::min<int64_t>(16, count - j), packed.get() + j * dim, dim);
            for (int64_t g = 0; g < group; g++) {
                __m256i w = j < count ? narrow(_mm512_loadu_ps(weights.data() + g * kChunk + j)) : __m256i{};
                _mm256_storeu_si256((__m256i*)(narrowed.data() + g * kChunk + j), w);
            }
        }
        finish_stores();
        for (int64_t d = 0; d < dim; d += 64) {
            alignas(64) float sum[16][64];
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t j = 0; j < end; j += 32) {
                const bf16* v = packed.get() + j * dim + 2 * d;
                int64_t bytes = 2 * dim * sizeof(bf16);
                _tile_loadd(4, narrowed.data() + j, kChunk * sizeof(bf16));
                _tile_loadd(5, v, bytes);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(6, v + 32, bytes);
                _tile_dpbf16ps(1, 4, 6);
                _tile_loadd(5, v + 64, bytes);
                _tile_dpbf16ps(2, 4, 5);
                _tile_loadd(6, v + 96, bytes);
                _tile_dpbf16ps(3, 4, 6);
            }
            _tile_stored(0, sum[0], sizeof(sum[0]));
            _tile_stored(1, sum[0] + 16, sizeof(sum[0]));
            _tile_stored(2, sum[0] + 32, sizeof(sum[0]));
            _tile_stored(3, sum[0] + 48, sizeof(sum[0]));
            for (int64_t g = 0; g < group; g++) memcpy(result + g * dim + d, sum[g], sizeof(sum[g]));
        }
    }
};

}  // namespace

// queries [rows, heads, dim] (rows `q_stride` apart) attend to the keys of their sequences in the pool.
// `tiles`: this process may use AMX.
extern "C" void decode_attention(const bf16* query, int64_t q_stride, const bf16* keys, const bf16* values,
                                 const int32_t* table, int64_t table_stride, const int64_t* slots,
                                 const int32_t* lens, bf16* out, int64_t rows, int64_t heads,
                                 int64_t kv_heads, int64_t dim, int64_t page_size, int64_t page_rows,
                                 float scale, int tiles) {
    int64_t group = heads / kv_heads, width = kv_heads * dim, partial = group * (dim + 2);
    bool by_tiles = tiles && group <= 16 && dim % 64 == 0 && page_size % 16 == 0;
    std::vector<int64_t> begin(rows + 1);  // each row's first item of work per key-value head
    for (int64_t r = 0; r < rows; r++)
        begin[r + 1] = begin[r] + std::max<int64_t>(1, (lens[r] + kChunk - 1) / kChunk);
    std::vector<int32_t> owner(begin[rows]);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = begin[r]; i < begin[r + 1]; i++) owner[i] = r;
    // Per item and head: the weighted sum of values, the maximum of the scores, the sum of the weights.
    std::vector<float> partials(begin[rows] * kv_heads * partial);
#pragma omp parallel
    {
        Chunk chunk(group, dim, by_tiles);
        TileSession session(by_tiles);
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < begin[rows] * kv_heads; work++) {
            int64_t item = work / kv_heads, h = work % kv_heads, r = owner[item];
            int64_t first = (item - begin[r]) * kChunk, count = std::min(kChunk, lens[r] - first);
            float* result = partials.data() + work * partial;
            const int32_t* pages = table + slots[r] * table_stride;
            for (int64_t j = 0, token = first; j < count;) {
                int64_t row = pages[token / page_size] * page_rows + token % page_size;
                for (int64_t end = std::min(count, j + page_size - token % page_size); j < end;
                     j++, token++, row++) {
                    chunk.keys[j] = keys + row * width + h * dim;
                    chunk.values[j] = values + row * width + h * dim;
                    for (int64_t d = 0; d < dim; d += kLanes) {
                        _mm_prefetch((const char*)(chunk.keys[j] + d), _MM_HINT_T1);
                        _mm_prefetch((const char*)(chunk.values[j] + d), _MM_HINT_T1);
                    }
                }
            }
            chunk.count = count;
            const bf16* q = query + r * q_stride + h * group * dim;
            if (by_tiles)
                chunk.score_by_tiles(q, scale, width);
            else
                chunk.score(q, scale);
            chunk.soften(result + group * dim);
            if (by_tiles)
                chunk.weigh_values_by_tiles(result);
            else
                chunk.weigh_values(result);
        }
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t head = 0; head < heads; head++) {
                int64_t h = head / group, g = head % group;
                auto of = [&](int64_t item) { return partials.data() + (item * kv_heads + h) * partial; };
                float most = -INFINITY, sum = 0;
                for (int64_t i = begin[r]; i < begin[r + 1]; i++)
                    most = std::max(most, of(i)[group * dim + 2 * g]);
                for (int64_t i = begin[r]; i < begin[r + 1]; i++)
                    sum += of(i)[group * dim + 2 * g + 1] * std::exp(of(i)[group * dim + 2 * g] - most);
                for (int64_t d = 0; d < dim; d += 16) {
                    __m512 acc = _mm512_setzero_ps();
                    for (int64_t i = begin[r]; i < begin[r + 1]; i++) {
                        float share =
                            begin[r + 1] - begin[r] == 1 ? 1 : std::exp(of(i)[group * dim + 2 * g] - most);
                        acc = _mm512_fmadd_ps(_mm512_set1_ps(share / sum),
                                              _mm512_loadu_ps(of(i) + g * dim + d), acc);
                    }
                    _mm256_storeu_si256((__m256i*)(out + (r * heads + head) * dim + d), narrow(acc));
                }
            }
    }
}

namespace {

constexpr int64_t kQueries = 64, kKeys = 256;  // of a block of prefill

// Sums of products of kRegisterRows rows by 64 columns, which are four times 16.
constexpr int64_t kRegisterRows = 4;
struct Registers {
    __m512 acc[4][4];
    inline void clear() { *this = {}; }
    inline void load(const float* p, int64_t stride) {
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < 4; i++) acc[r][i] = _mm512_loadu_ps(p + r * stride + 16 * i);
    }
    inline void store(float* p, int64_t stride) const {
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < 4; i++) _mm512_storeu_ps(p + r * stride + 16 * i, acc[r][i]);
    }
    // Adds the sum over `pairs`, a multiple of 16: per pair, a row of `a` has two bfloat16 numbers, and `b`
    // two per column. The columns of part `i` begin at `b + i * b_column`.
    inline void multiply(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride, int64_t b_column,
                         int64_t pairs) {
        for (int64_t p = 0; p < pairs; p++) {
            __m512bh y[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) y[i] = load_bf16(b + p * b_stride + i * b_column);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                int32_t two;
                memcpy(&two, a + r * a_stride + 2 * p, 4);
                __m512bh x = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], x, y[i]);
            }
        }
    }
};

// The same sum by tiles of AMX, for 32 rows and 32 columns; with `add` it is added to what is at `out`. Rows
// of `b` are `b_stride` apart within 16 pairs, and the next 16 pairs begin `b_step` later.
inline void multiply_by_tiles(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride,
                              int64_t b_column, int64_t b_step, int64_t pairs, bool add, float* out,
                              int64_t out_stride) {
    int64_t a_bytes = a_stride * sizeof(bf16), b_bytes = b_stride * sizeof(bf16),
            out_bytes = out_stride * sizeof(float);
    finish_stores();
    if (add) {
        _tile_loadd(0, out, out_bytes);
        _tile_loadd(1, out + 16, out_bytes);
        _tile_loadd(2, out + 16 * out_stride, out_bytes);
        _tile_loadd(3, out + 16 * out_stride + 16, out_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t p = 0; p < pairs; p += 16, a += kLanes, b += b_step) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(5, a + 16 * a_stride, a_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_loadd(7, b + b_column, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
    _tile_stored(2, out + 16 * out_stride, out_bytes);
    _tile_stored(3, out + 16 * out_stride + 16, out_bytes);
}

struct Heads {
    int64_t heads, dim;
    float scale;
    bool tiles;
};

// Buffers of one thread for a block of queries of one head.
struct Block {
    std::vector<float> scores, sum;
    std::vector<bf16> weights, q;
    float most[kQueries], total[kQueries];
    explicit Block(int64_t dim)
        : scores(kQueries * kKeys), sum(kQueries * dim), weights(kQueries * kKeys), q(kQueries * dim) {}

    // Queries `first_q` to `first_q + num_q - 1` of `head` attend; query i sees keys 0 to before + i.
    void attend(const bf16* query, int64_t q_stride, const bf16* k, const bf16* v, bf16* out, int64_t head,
                int64_t first_q, int64_t num_q, int64_t before, const Heads& s) {
        int64_t dim = s.dim, at_once = s.tiles ? 32 : kRegisterRows,
                rows = (num_q + at_once - 1) / at_once * at_once;
        for (int64_t r = 0; r < rows; r++)
            memcpy(q.data() + r * dim, query + (first_q + std::min(r, num_q - 1)) * q_stride + head * dim,
                   dim * sizeof(bf16));
        std::fill(sum.begin(), sum.end(), 0.0f);
        std::fill(most, most + kQueries, -INFINITY);
        std::fill(total, total + kQueries, 0.0f);
        int64_t end = before + first_q + num_q;  // the keys that the last query sees
        for (int64_t first = 0; first < end; first += kKeys) {
            int64_t num = std::min(kKeys, (end - first + 63) / 64 * 64);
            for (int64_t r = 0; r < rows; r += at_once) score(k + first * dim, r, num, s);
            for (int64_t r = 0; r < rows; r++)
                soften(r, num, before + first_q + std::min(r, num_q - 1) + 1 - first, s);
            for (int64_t r = 0; r < rows; r += at_once) add_values(v + first * dim, r, num, s);
        }
        for (int64_t r = 0; r < num_q; r++)
            for (int64_t d = 0; d < dim; d += 16)
                _mm256_storeu_si256((__m256i*)(out + ((first_q + r) * s.heads + head) * dim + d),
                                    narrow(_mm512_mul_ps(_mm512_loadu_ps(sum.data() + r * dim + d),
                                                         _mm512_set1_ps(1.0f / total[r]))));
    }

    // The scores of `num` keys, for a number of rows from `r` on: 32 with tiles, or else kRegisterRows.
    void score(const bf16* k, int64_t r, int64_t num, const Heads& s) {
        const bf16* rows = q.data() + r * s.dim;
        float* to = scores.data() + r * kKeys;
        if (s.tiles)
            for (int64_t j = 0; j < num; j += 32)
                multiply_by_tiles(rows, s.dim, k + j * s.dim, 32, 16 * s.dim, 16 * 32, s.dim / 2, false,
                                  to + j, kKeys);
        else
            for (int64_t j = 0; j < num; j += 64) {
                Registers t;
                t.clear();
                t.multiply(rows, s.dim, k + j * s.dim, 32, 16 * s.dim, s.dim / 2);
                t.store(to + j, kKeys);
            }
    }

    // Adds the weighted values of `num` keys, for as many rows from `r` on.
    void add_values(const bf16* v, int64_t r, int64_t num, const Heads& s) {
        const bf16* rows = weights.data() + r * kKeys;
        float* to = sum.data() + r * s.dim;
        if (s.tiles)
            for (int64_t d = 0; d < s.dim; d += 32)
                multiply_by_tiles(rows, kKeys, v + 2 * d, 2 * s.dim, 32, 32 * s.dim, num / 2, true, to + d,
                                  s.dim);
        else
            for (int64_t d = 0; d < s.dim; d += 64) {
                Registers t;
                t.load(to + d, s.dim);
                t.multiply(rows, kKeys, v + 2 * d, 2 * s.dim, 32, num / 2);
                t.store(to + d, s.dim);
            }
    }

    // One row's weights of `num` more keys, of which the first `visible` count; shrinks its sum if the
    // maximum grows.
    void soften(int64_t r, int64_t num, int64_t visible, const Heads& s) {
        float* row = scores.data() + r * kKeys;
        __m512 top = _mm512_set1_ps(-INFINITY);
        for (int64_t j = 0; j < num && j < visible; j += 16)
            top = _mm512_mask_max_ps(top, first16(visible - j), top, _mm512_loadu_ps(row + j));
        float next = std::max(most[r], _mm512_reduce_max_ps(top) * s.scale);
        float shrink = next == -INFINITY ? 1.0f : std::exp(most[r] - next);
        float shift = next == -INFINITY ? 0.0f : next;  // scores of -inf get weights of 0
        __m512 added = _mm512_setzero_ps();
        for (int64_t j = 0; j < num; j += 16) {
            __m512 e = _mm512_setzero_ps();
            if (j < visible) {
                e = exp_ps(_mm512_fmsub_ps(_mm512_loadu_ps(row + j), _mm512_set1_ps(s.scale),
                                           _mm512_set1_ps(shift)));
                e = _mm512_maskz_mov_ps(first16(visible - j), e);
                added = _mm512_add_ps(added, e);
            }
            _mm256_storeu_si256((__m256i*)(weights.data() + r * kKeys + j), narrow(e));
        }
        total[r] = total[r] * shrink + _mm512_reduce_add_ps(added);
        most[r] = next;
        if (shrink != 1.0f)
            for (int64_t d = 0; d < s.dim; d += 16)
                _mm512_storeu_ps(
                    sum.data() + r * s.dim + d,
                    _mm512_mul_ps(_mm512_loadu_ps(sum.data() + r * s.dim + d), _mm512_set1_ps(shrink)));
    }
};

}  // namespace

// Sequences `first` to `last - 1`: the tokens of sequence i are q_starts[i] to q_starts[i + 1] - 1, the last
// ones of its kv_lens[i] tokens. A query's bits depend on its own sequence up to its own token alone, as long
// as the values of later tokens are finite: these have weights of 0. dim is a multiple of 64. `tiles`: this
// process may use AMX.
extern "C" void prefill_attention(const bf16* query, int64_t q_stride, const bf16* keys, const bf16* values,
                                  const int32_t* table, int64_t table_stride, const int64_t* slots,
                                  const int32_t* q_starts, const int32_t* kv_lens, bf16* out, int64_t first,
                                  int64_t last, int64_t heads, int64_t kv_heads, int64_t dim,
                                  int64_t page_size, int64_t page_rows, float scale, int tiles) {
    Heads sizes{heads, dim, scale, tiles != 0};
    int64_t width = kv_heads * dim, longest = 0;
    for (int64_t i = first; i < last; i++) longest = std::max<int64_t>(longest, (kv_lens[i] + 63) / 64 * 64);
    std::unique_ptr<bf16[]> packed_keys(new bf16[longest * width]), packed_values(new bf16[longest * width]);
#pragma omp parallel
    {
        Block block(dim);
        TileSession session(sizes.tiles);
        for (int64_t i = first; i < last; i++) {
            int64_t kv_len = kv_lens[i], padded = (kv_len + 63) / 64 * 64,
                    blind = std::max<int64_t>(0, q_starts[i + 1] - q_starts[i] - kv_len);
            int64_t start = q_starts[i] + blind, q_len = q_starts[i + 1] - start;
            const int32_t* pages = table + slots[i] * table_stride;
            const bf16* q = query + start * q_stride;
            bf16* o = out + start * heads * dim;
#pragma omp single
            memset((void*)(out + q_starts[i] * heads * dim), 0, blind * heads * dim * sizeof(bf16));
#pragma omp for schedule(static)
            for (int64_t work = 0; work < kv_heads * padded / 16; work++) {
                int64_t h = work / (padded / 16), at = work % (padded / 16) * 16,
                        count = std::max<int64_t>(0, std::min<int64_t>(16, kv_len - at));
                const bf16 *key_rows[16], *value_rows[16];
                for (int64_t j = 0; j < count; j++) {
                    int64_t row = pages[(at + j) / page_size] * page_rows + (at + j) % page_size;
                    key_rows[j] = keys + row * width + h * dim;
                    value_rows[j] = values + row * width + h * dim;
                }
                pack_columns(key_rows, count, packed_keys.get() + (h * padded + at) * dim, dim);
                pack_values(value_rows, count, packed_values.get() + (h * padded + at) * dim, dim);
            }
            int64_t blocks = (q_len + kQueries - 1) / kQueries;
#pragma omp for schedule(dynamic, 1)
            for (int64_t work = 0; work < heads * blocks; work++) {  // the longest blocks first
                int64_t head = work % heads, first_q = (blocks - 1 - work / heads) * kQueries,
                        at = head / (heads / kv_heads) * padded * dim;
                block.attend(q, q_stride, packed_keys.get() + at, packed_values.get() + at, o, head, first_q,
                             std::min(kQueries, q_len - first_q), kv_len - q_len, sizes);
            }
        }
    }
}
