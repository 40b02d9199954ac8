//! Exact, order-defined arithmetic for language models on weights as they are published.
//!
//! A model is written against [`Backend`], a small vocabulary of operations (matrix product, norm, KDA step, latent
//! attention, residual mix, router, expert, combine) on activations that the back end owns. [`Cpu`] is the back end
//! for the processor. Weights keep their stored form: bf16 or f32 for what is resident, MXFP4 for experts, seen
//! through a [`Matrix`] over borrowed bytes of any alignment. Who wants half the bytes for the resident ones converts them row by
//! row with [`quantize_row`].
//!
//! Every output number has one defined sequence of f32 operations, written down in `docs/numerics.md` under the version
//! [`NUMERICS_VERSION`]. Each operation has a plain definition; the AVX2 and AVX-512 forms, chosen at run time as
//! [`Isa`], give the same bits, for one row or five hundred and on any number of threads.
//!
//! ```
//! use kernels::{Backend, Cpu, Isa, WeightFormat};
//! use std::sync::Arc;
//!
//! let cpu = Cpu::new(Isa::detect(), 1)?;
//! let bf16 = |v: f32| ((v.to_bits() >> 16) as u16).to_le_bytes();
//! let w: Vec<u8> = [1.0, 2.0, 3.0, 4.0].into_iter().flat_map(bf16).collect();
//! let w = cpu.linear(2, 2, WeightFormat::Bf16, Arc::new(w))?;
//! let (mut x, mut y) = (cpu.act(1, 2), cpu.act(1, 2));
//! cpu.upload_bf16(&[bf16(1.0), bf16(-1.0)].concat(), &mut x);
//! cpu.matmul(&w, &x, &mut y);
//! assert_eq!(cpu.download(&y), [-1.0, -1.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod aligned;
mod backend;
mod bytes;
mod cpu;
mod format;
mod functions;
mod int8;
mod isa;
mod kda;
mod latents;
mod matmul;
mod mla;
mod registers;
#[cfg(test)]
mod testing;
mod vector;

pub use backend::{
    Backend, Demand, ExpertMatrices, ExpertWork, MlaShape, Routes, SharedBytes, SituCaps, Span, Taker, WeightFormat,
};
pub use cpu::{Cpu, KdaState, ROWS_OF_A_THREAD, Rows, ThreadsError, Weights};
pub use format::{BLOCK, E2M1, Elements, Matrix, SCALE_NAN, ShapeError, bf16_to_f32, e8m0, f32_to_bf16};
pub use functions::{exp, sigmoid, silu, situ, tanh};
pub use int8::{INT8_MOST, NotFinite, quantize_row};
pub use isa::Isa;
pub use latents::{ATTENTION_BLOCK, KvFormat, Latents};
pub use matmul::{LANES, Lane, Packed, tree};
pub use vector::MAX_SOURCES;

/// Version of the arithmetic in `docs/numerics.md`. Anything that changes a bit of a result raises it.
pub const NUMERICS_VERSION: u32 = 1;
