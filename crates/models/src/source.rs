use kernels::{ExpertMatrices, SharedBytes, WeightFormat};

/// A resident tensor as published.
pub struct Tensor {
    /// Format of the elements.
    pub format: WeightFormat,
    /// Shape, outermost first.
    pub shape: Vec<usize>,
    /// Little-endian elements, row-major.
    pub data: SharedBytes,
}

impl Tensor {
    /// All elements as f32, exactly.
    pub(crate) fn numbers(&self) -> Vec<f32> {
        let bytes = (*self.data).as_ref();
        match self.format {
            WeightFormat::Bf16 => bytes
                .as_chunks::<2>()
                .0
                .iter()
                .map(|b| kernels::bf16_to_f32(u16::from_le_bytes(*b)))
                .collect(),
            WeightFormat::F32 => bytes
                .as_chunks::<4>()
                .0
                .iter()
                .map(|b| f32::from_le_bytes(*b))
                .collect(),
            WeightFormat::Int8 => {
                let rows = self.shape[0];
                let (data, scale) = bytes.split_at(bytes.len() - 4 * rows);
                let rows = data.chunks_exact(data.len() / rows).zip(scale.as_chunks::<4>().0);
                rows.flat_map(|(row, scale)| row.iter().map(|&i| i as i8 as f32 * f32::from_le_bytes(*scale)))
                    .collect()
            }
        }
    }
}

/// Where a model's resident tensors come from. Names are the checkpoint's, without the `language_model.` prefix; shapes and
/// formats have been checked against the configuration.
pub trait TensorSource {
    /// Why a tensor cannot be had.
    type Error: From<kernels::ShapeError>;

    /// One tensor.
    fn tensor(&mut self, name: &str) -> Result<Tensor, Self::Error>;
}

/// Most experts that a model is given at once: as many as one token of K3 takes in a layer.
pub const EXPERTS_TOGETHER: usize = 16;

/// Takes experts, each with its id, and computes them.
pub type RunExperts<'a> = dyn FnMut(&[(u32, ExpertMatrices)]) + 'a;

/// Where a pass gets its experts. The model says what a layer needs as soon as the router has spoken, goes on with what
/// needs no expert, and then runs each expert as it lands, in whatever order that is.
pub trait ExpertStream {
    /// Why an expert cannot be had.
    type Error;

    /// Asks for `experts` (ascending, each once) of `layer`. Nothing of an earlier demand is left when this is called.
    fn demand(&mut self, layer: usize, experts: &[u32]) -> Result<(), Self::Error>;

    /// Waits for the next expert and gives it to `run`, together with others that are there as well, up to
    /// [`EXPERTS_TOGETHER`]; `false` when all that was demanded has been run.
    fn next(&mut self, run: &mut RunExperts) -> Result<bool, Self::Error>;
}
