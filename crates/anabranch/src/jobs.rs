//! `anabranch jobs`: answers to a file of questions, many at a time.
//!
//! The input is read three times, line by line: to see that the results belong to it, to find what its lines need and which
//! have an error, and to answer the others. A line's result depends on nothing but the line, the model and the settings, so a run
//! that was stopped anywhere goes on with the lines that have none.

use std::ops::ControlFlow;
use std::path::Path;

use checkpoint::Checkpoint;
use checkpoint::tokenizer::Tokenizer;
use engine::{Batch, Ended, Engine, Fairness, LayerProbe, MAX_PASS_ROWS, MemoryPlan, Transcript, Wishes};

use crate::args::DEFAULT_MAX_TOKENS;
use crate::error::Error;
use crate::files::{self, expect_file};
use crate::model::{self, Needs};
use crate::output;
use crate::reads::Reads;
use crate::run::describe;
use crate::settings::Jobs;
use crate::signals::Interrupt;

mod fields;
mod identity;
mod input;
mod report;
mod request;
mod results;

use fields::LineError;
use input::{Input, Line};
use report::{Progress, Summary};
use request::{Job, Kind, Reader};
use results::{Answered, Results};

/// Most sequences at one time: half of the rows of the largest pass, so that as many are left for prompts.
const MOST_SEQUENCES: usize = MAX_PASS_ROWS / 2;

pub fn jobs(settings: &Jobs, interrupt: &Interrupt) -> Result<(), Error> {
    let _working = interrupt.working();
    expect_file(&settings.input, false)?;
    expect_file(&settings.output, true)?;
    if files::are_one(&settings.input, &settings.output) {
        return Err(Error::SameFile {
            path: settings.output.clone(),
        });
    }
    let dir = model::folder(&settings.model)?;
    let checkpoint = Checkpoint::open(&dir)?;
    let tokenizer = Tokenizer::load(&dir)?;
    let config = checkpoint.config();
    let limit = config.max_position_embeddings;
    let positions = settings.context.unwrap_or(limit);
    if positions > limit {
        return Err(engine::Error::ContextLimit {
            wanted: positions,
            limit,
        }
        .into());
    }
    let max_tokens = settings.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
    let identity = identity::hash(&checkpoint, settings, max_tokens)?;
    let reader = Reader {
        tokenizer: &tokenizer,
        stop_ids: checkpoint.stop_ids().to_vec(),
        vocabulary: config.vocab_size,
        positions,
        limited_by: match settings.context {
            Some(_) => "--context",
            None => "max_position_embeddings of the model",
        },
        effort: settings.effort,
        max_tokens,
    };
    let results = Results::open(&settings.output)?;
    let lines = belongs(settings, identity, &results)?;
    let mut work = Work {
        settings,
        identity,
        reader,
        summary: Summary {
            lines,
            trunk: settings.machine.trunk.format(),
            done_before: results.counts().0,
            ..Summary::default()
        },
        results,
        model: model_name(&dir),
        interrupt,
    };
    work.results.mend()?;
    let ran = work.run(checkpoint);
    work.end(ran)
}

/// Sees that every result is one of this input, with this model and these settings; the number of lines.
fn belongs(settings: &Jobs, identity: u128, results: &Results) -> Result<u64, Error> {
    let mut input = Input::open(&settings.input, identity)?;
    let (mut lines, mut found) = (0, 0);
    while let Some(line) = input.next()? {
        lines += 1;
        found += u64::from(results.has(line.key));
    }
    let (done, _) = results.counts();
    match done - found {
        0 => Ok(lines),
        others => Err(Error::OtherResults {
            path: settings.output.clone(),
            input: settings.input.clone(),
            others,
        }),
    }
}

/// What answers, as results call it: the folder's name.
fn model_name(dir: &Path) -> String {
    let full = dir.canonicalize();
    let name = full.as_deref().unwrap_or(dir).file_name();
    name.unwrap_or_default().to_string_lossy().into_owned()
}

/// A run.
struct Work<'a> {
    settings: &'a Jobs,
    /// Hash of the model and the settings.
    identity: u128,
    reader: Reader<'a>,
    results: Results,
    summary: Summary,
    model: String,
    interrupt: &'a Interrupt,
}

/// What the lines that have no result need.
#[derive(Default)]
struct Survey {
    /// Lines that can be answered.
    jobs: usize,
    /// Of the longest.
    positions: usize,
    prompt_tokens: usize,
    /// Lines that ask for another model, and the first one's words.
    other_model: Option<(u64, String)>,
}

/// A line that is being answered.
struct Asked {
    key: u128,
    custom_id: String,
    kind: Kind,
    prompt_tokens: usize,
    transcript: Transcript,
}

/// A line and what it asks, or why it asks nothing.
type Next = (Line, Result<Job, LineError>);

impl Work<'_> {
    fn run(&mut self, checkpoint: Checkpoint) -> Result<(), Error> {
        let survey = self.survey()?;
        if let Some((lines, name)) = &survey.other_model {
            output::note(format_args!(
                "lines that ask for another model: {lines}, the first for {name:?}; {} answers them",
                self.model
            ));
        }
        if survey.jobs == 0 {
            return Ok(());
        }
        let sequences = self.settings.batch.unwrap_or(MOST_SEQUENCES);
        let mut needs = Needs {
            positions: survey.positions,
            pass_rows: survey.prompt_tokens.max(survey.jobs).min(MAX_PASS_ROWS),
            sequences: sequences.min(survey.jobs),
            all_logits: false,
        };
        needs.positions = self.fitting(&checkpoint, &needs);
        let (settings, interrupt) = (self.settings, self.interrupt);
        let mut engine = model::load(checkpoint, &settings.experts, &settings.machine, &needs, interrupt)?;
        if settings.verbose {
            describe(&engine);
        }
        let before = Reads::so_far(&engine);
        let ran = self.answer_all(&mut engine);
        engine.settle();
        self.summary.reads = Reads::so_far(&engine).since(&before);
        self.summary.cost(&engine);
        model::pass_notices_on(&engine);
        ran
    }

    /// Reads the lines that have no result. Those that have an error get it at once.
    fn survey(&mut self) -> Result<Survey, Error> {
        let mut survey = Survey::default();
        let mut input = Input::open(&self.settings.input, self.identity)?;
        while let Some((line, job)) = self.next(&mut input)? {
            if self.interrupt.cancel().is_cancelled() {
                return Err(Error::Interrupted);
            }
            match job {
                Err(error) => self.refuse(&line, &error)?,
                Ok(job) => {
                    survey.jobs += 1;
                    survey.positions = survey.positions.max(job.positions());
                    survey.prompt_tokens += job.request.prompt.len();
                    if let Some(name) = job.model.filter(|name| *name != self.model) {
                        survey.other_model.get_or_insert((0, name)).0 += 1;
                    }
                }
            }
        }
        Ok(survey)
    }

    /// The next line that has no result, read.
    fn next(&self, input: &mut Input) -> Result<Option<Next>, Error> {
        while let Some(mut line) = input.next()? {
            if !self.results.has(line.key) {
                let json = std::mem::replace(&mut line.json, Ok(serde_json::Value::Null));
                let job = json.and_then(|json| self.reader.job(json));
                return Ok(Some((line, job)));
            }
        }
        Ok(None)
    }

    fn refuse(&mut self, line: &Line, error: &LineError) -> Result<(), Error> {
        self.results
            .error(line.key, line.custom_id.as_deref(), line.number, error)
    }

    /// The positions that are needed, or as many as fit the memory; longer lines are then refused.
    fn fitting(&mut self, checkpoint: &Checkpoint, needs: &Needs) -> usize {
        let options = engine::Options::default();
        let machine = &self.settings.machine;
        let slot_bytes = engine::most_slot_bytes(checkpoint.max_expert_bytes(), checkpoint.max_extents() as u64);
        let wishes = Wishes {
            budget: machine.memory.unwrap_or(options.memory),
            positions: needs.positions,
            sequences: 1,
            kv: machine.kv,
            trunk: machine.trunk.format(),
            cache: Some(0),
            pass_rows: 1,
            all_logits: false,
            slots: None,
            threads: machine.threads.unwrap_or(options.threads),
        };
        let fitting = MemoryPlan::most_positions(checkpoint.config(), checkpoint.schema(), slot_bytes, &wishes);
        // Where not even one position fits, loading says what would do.
        if fitting == 0 || fitting >= needs.positions {
            return needs.positions;
        }
        output::note(format_args!(
            "memory holds {fitting} tokens of context, and some lines need up to {}: those that need more get an error; \
             raise --memory for them",
            needs.positions
        ));
        self.reader.positions = fitting;
        self.reader.limited_by = "what --memory holds";
        fitting
    }

    fn answer_all(&mut self, engine: &mut Engine) -> Result<(), Error> {
        let (tokenizer, interrupt) = (self.reader.tokenizer, self.interrupt);
        let mut input = Input::open(&self.settings.input, self.identity)?;
        let mut batch = Batch::new(engine, Fairness::FullPasses);
        let mut progress = Progress::new(engine, self.settings.verbose);
        let mut answered = 0;
        self.summary.sequences = batch.limit();
        loop {
            while batch.has_room()
                && let Some((line, job)) = self.next(&mut input)?
            {
                match job {
                    Err(error) => self.refuse(&line, &error)?,
                    Ok(job) => join(&mut batch, engine, line.key, job)?,
                }
            }
            if batch.is_empty() {
                return Ok(());
            }
            self.summary.done = self.results.counts().0;
            progress.update(
                &self.summary,
                answered,
                batch.running(),
                batch.generated(),
                engine.stats(),
            );
            let mut tell = |layer| progress.layer(layer);
            let ended = batch.step(
                engine,
                interrupt.cancel(),
                Some(&mut LayerProbe(&mut tell)),
                &mut |asked: &mut Asked, id| {
                    asked.transcript.push(tokenizer, id);
                    match asked.transcript.stopped() {
                        true => ControlFlow::Break(()),
                        false => ControlFlow::Continue(()),
                    }
                },
            );
            self.summary.time_s = progress.seconds();
            for ended in ended? {
                answered += 1;
                self.write(ended)?;
            }
        }
    }

    fn write(&mut self, ended: Ended<Asked>) -> Result<(), Error> {
        let (mut asked, made) = (ended.tag, ended.generated);
        asked.transcript.finish(self.reader.tokenizer);
        self.summary.prompt_tokens += asked.prompt_tokens as u64;
        self.summary.generated_tokens += made.ids.len() as u64;
        let answered = Answered {
            kind: asked.kind,
            model: &self.model,
            fingerprint: self.identity,
            trunk: self.settings.machine.trunk.format(),
            text: &asked.transcript.text,
            reasoning: &asked.transcript.reasoning,
            finish_reason: made.finish.name(),
            prompt_tokens: asked.prompt_tokens,
            completion_tokens: made.ids.len(),
        };
        self.results.answer(asked.key, &asked.custom_id, &answered)
    }

    /// Says what there is now, however the run ended.
    fn end(mut self, ran: Result<(), Error>) -> Result<(), Error> {
        let synced = self.results.finish();
        (self.summary.done, self.summary.errors) = self.results.counts();
        self.summary.peak_memory_bytes = engine::peak_bytes();
        output::say(self.summary.text());
        if self.settings.stats {
            output::say(self.summary.table().trim_end());
        }
        if self.summary.done < self.summary.lines {
            output::say("the same command goes on with the lines that are left");
        }
        if self.settings.json {
            let text = serde_json::to_string(&self.summary).map_err(|e| Error::Output(e.into()))?;
            output::print(&(text + "\n"))?;
        }
        ran?;
        synced?;
        match self.summary.errors {
            0 => Ok(()),
            errors => Err(Error::LineErrors {
                path: self.settings.output.clone(),
                errors,
                of: self.summary.lines,
            }),
        }
    }
}

/// Lets a line into the batch.
fn join(batch: &mut Batch<Asked>, engine: &Engine, key: u128, job: Job) -> Result<(), Error> {
    let asked = Asked {
        key,
        custom_id: job.custom_id,
        kind: job.kind,
        prompt_tokens: job.request.prompt.len(),
        transcript: match job.kind {
            Kind::Chat(effort) => Transcript::chat(effort, job.stops),
            Kind::Completion => Transcript::raw(job.stops),
        },
    };
    Ok(batch.join(engine, job.request, asked)?)
}
