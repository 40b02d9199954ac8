//! The experts of a pass, from the drives to the model.

use crate::error::Error;
use crate::generate::Cancel;
use checkpoint::{Checkpoint, ExpertPart, ExpertPlace, TEXT_PREFIX, expert_tensor_name};
use drives::{Barrier, ExpertId, Landed, LayoutBuilder, Source, Streamer};
use kernels::{Elements, ExpertMatrices, Matrix};
use models::ExpertStream;

/// The published folder as a layout: one home for each expert.
pub(crate) fn layout(checkpoint: &Checkpoint) -> Result<drives::Layout, Error> {
    let c = checkpoint.config();
    let mut builder = LayoutBuilder::new();
    for layer in (0..c.num_hidden_layers).filter(|&layer| c.is_moe(layer)) {
        for expert in 0..c.num_experts {
            let place = checkpoint.expert(layer, expert)?;
            let mut sources = Vec::with_capacity(place.extents().len());
            for extent in place.extents() {
                let file = builder.file(&checkpoint.shards()[extent.shard].path)?;
                sources.push(Source {
                    file,
                    offset: extent.offset,
                    len: extent.len,
                });
            }
            builder.expert(
                ExpertId {
                    layer: layer as u32,
                    expert: expert as u32,
                },
                &sources,
            )?;
        }
    }
    Ok(builder.build()?)
}

/// Streams the experts of one pass and counts what it needed.
pub(crate) struct PassExperts<'a> {
    checkpoint: &'a Checkpoint,
    streamer: &'a mut Streamer,
    cancel: &'a Cancel,
    needed_bytes: &'a mut u64,
    barrier: Option<(usize, Barrier)>,
}

impl<'a> PassExperts<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        streamer: &'a mut Streamer,
        cancel: &'a Cancel,
        needed_bytes: &'a mut u64,
    ) -> Self {
        Self {
            checkpoint,
            streamer,
            cancel,
            needed_bytes,
            barrier: None,
        }
    }

    fn run(&self, layer: usize, landed: &Landed, run: &mut dyn FnMut(u32, &ExpertMatrices)) -> Result<(), Error> {
        let c = self.checkpoint.config();
        let expert = landed.expert.expert as usize;
        let place = self.checkpoint.expert(layer, expert)?;
        let (inner, latent) = (c.moe_intermediate_size, c.routed_expert_hidden_size);
        let matrix = |rows, cols, packed, scale| -> Result<Matrix<'_>, Error> {
            let m = Matrix::new(
                rows,
                cols,
                Elements::Mxfp4 {
                    packed: part(landed, &place, packed),
                    scale: part(landed, &place, scale),
                },
            )?;
            match m.find_nan_scale() {
                None => Ok(m),
                Some((row, block)) => Err(Error::ScaleNan {
                    path: self.checkpoint.shards()[place.extents()[place.part(scale).extent].shard]
                        .path
                        .clone(),
                    tensor: format!("{TEXT_PREFIX}{}", expert_tensor_name(layer, expert, scale)),
                    row,
                    block,
                }),
            }
        };
        let matrices = ExpertMatrices {
            gate: matrix(inner, latent, ExpertPart::W1Packed, ExpertPart::W1Scale)?,
            up: matrix(inner, latent, ExpertPart::W3Packed, ExpertPart::W3Scale)?,
            down: matrix(latent, inner, ExpertPart::W2Packed, ExpertPart::W2Scale)?,
        };
        run(landed.expert.expert, &matrices);
        Ok(())
    }
}

/// One tensor's bytes where they landed.
fn part<'a>(landed: &'a Landed, place: &ExpertPlace, part: ExpertPart) -> &'a [u8] {
    let at = place.part(part);
    &landed.lease.extent(at.extent)[at.offset as usize..][..at.len as usize]
}

impl ExpertStream for PassExperts<'_> {
    type Error = Error;

    fn demand(&mut self, layer: usize, experts: &[u32]) -> Result<(), Error> {
        self.cancel.check()?;
        let ids: Vec<ExpertId> = experts
            .iter()
            .map(|&expert| ExpertId {
                layer: layer as u32,
                expert,
            })
            .collect();
        for id in &ids {
            *self.needed_bytes += self.checkpoint.expert(layer, id.expert as usize)?.bytes();
        }
        self.barrier = Some((layer, self.streamer.demand(&ids)?));
        Ok(())
    }

    fn next(&mut self, run: &mut dyn FnMut(u32, &ExpertMatrices)) -> Result<bool, Error> {
        self.cancel.check()?;
        let Some((layer, barrier)) = &self.barrier else {
            return Ok(false);
        };
        match self.streamer.next(barrier)? {
            Some(landed) => self.run(*layer, &landed, run).map(|()| true),
            None => {
                self.barrier = None;
                Ok(false)
            }
        }
    }
}
