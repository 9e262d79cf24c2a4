// Matrix products, on a CPU with AVX512-BF16. All tensors are bfloat16 unless said otherwise, rows are
// contiguous.
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "registers.h"

namespace {

constexpr int64_t kPackedRows = 5;  // rows of x from which packing them is worth it

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

constexpr int64_t kGroup = 128;  // rows of x that a thread takes at a time, with one panel of the weight

// Rows of x that are packed at a time: as many as stay in a core's L2 cache, or where that leaves many
// threads without work, more.
inline int64_t rows_at_once(int64_t depth, int64_t panels) {
    int64_t rows = std::clamp<int64_t>(655360 / (depth * sizeof(bf16)) / 32 * 32, kGroup, 512);
    return panels * (rows / kGroup) < 4 * omp_get_max_threads() ? 512 : rows;
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
