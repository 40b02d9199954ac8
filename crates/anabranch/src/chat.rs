//! A conversation, line by line.

use std::io::BufRead;

use checkpoint::chat::{Effort, Message, Role, render};
use checkpoint::tokenizer::Tokenizer;
use engine::{Engine, Finish, Request, Sequence, Transcript};

use crate::answer::{Answer, answer};
use crate::error::Error;
use crate::model;
use crate::output::Screen;
use crate::run::{Room, utf8};
use crate::settings::Generation;
use crate::signals::Interrupt;

const WELCOME: &str = "A line is a message. Ctrl-C stops an answer; /quit or Ctrl-D ends the chat.\n";
const READY: &str = "> ";
const QUIT: &str = "/quit";

/// A conversation and the sequence that has seen most of it.
pub struct Chat<'a> {
    pub engine: &'a mut Engine,
    pub tokenizer: &'a Tokenizer,
    pub generation: &'a Generation,
    pub effort: Effort,
    pub messages: Vec<Message>,
    pub sequence: Option<Sequence>,
    /// Whether each answer is followed by its costs.
    pub stats: bool,
}

impl Chat<'_> {
    /// Answers lines until there are no more, or one says [`QUIT`].
    pub fn talk(
        &mut self,
        input: &mut dyn BufRead,
        screen: &mut Screen<'_>,
        interrupt: &Interrupt,
    ) -> Result<(), Error> {
        screen.aside(WELCOME);
        loop {
            screen.aside(READY);
            let mut line = vec![];
            if input.read_until(b'\n', &mut line).map_err(Error::Input)? == 0 {
                screen.aside("\n");
                return Ok(());
            }
            let line = match utf8(line.trim_ascii(), "the line") {
                Ok(line) => line,
                Err(problem) => {
                    screen.aside(&format!("note: {problem}\n"));
                    continue;
                }
            };
            match line.as_str() {
                "" => {}
                QUIT => return Ok(()),
                _ => self.turn(line, screen, interrupt)?,
            }
        }
    }

    /// One question and its answer. A question that was not answered at all is forgotten.
    fn turn(&mut self, question: String, screen: &mut Screen<'_>, interrupt: &Interrupt) -> Result<(), Error> {
        self.messages.push(Message::new(Role::User, question));
        let working = interrupt.working();
        let made = self.answer(screen, interrupt)?;
        drop(working);
        model::pass_notices_on(self.engine);
        if self.stats {
            screen.aside(&made.stats.table());
        }
        if made.finish_reason == Finish::Cancelled {
            screen.aside("(stopped)\n");
        }
        if made.ids.is_empty() {
            self.messages.pop();
            return Ok(());
        }
        let mut message = Message::new(Role::Assistant, made.text);
        message.reasoning = self.effort.thinks().then_some(made.reasoning);
        self.messages.push(message);
        Ok(())
    }

    fn answer(&mut self, screen: &mut Screen<'_>, interrupt: &Interrupt) -> Result<Answer, Error> {
        let prompt = render(self.tokenizer, &self.messages, self.effort);
        let positions = self.engine.plan().positions;
        let room = Room::new(prompt.len(), self.generation.max_tokens, Some(positions), positions)?;
        let (mut sequence, seen) = self.sequence_for(&prompt);
        let request = Request {
            prompt: prompt[seen..].to_vec(),
            max_tokens: room.max_tokens,
            stop_ids: self.engine.checkpoint().stop_ids().to_vec(),
            sampling: self.generation.sampling,
        };
        let transcript = Transcript::chat(self.effort, self.generation.stops.clone());
        let made = answer(
            self.engine,
            self.tokenizer,
            &mut sequence,
            request,
            transcript,
            screen,
            interrupt.cancel(),
        );
        self.sequence = Some(sequence);
        made
    }

    /// A sequence that has seen the beginning of `prompt`, and how much: the last one where its tokens are that beginning,
    /// else a new one.
    fn sequence_for(&mut self, prompt: &[u32]) -> (Sequence, usize) {
        // The old one is dropped before there is a new one: memory is set aside for one.
        let old = self.sequence.take().filter(|sequence| {
            let ids = sequence.ids();
            !sequence.is_spoilt() && ids.len() < prompt.len() && prompt.starts_with(ids)
        });
        match old {
            Some(sequence) => {
                let seen = sequence.ids().len();
                (sequence, seen)
            }
            None => (self.engine.new_sequence(), 0),
        }
    }
}
