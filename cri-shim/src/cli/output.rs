//! What commands print: results on stdout, messages for the user on stderr.

use std::io::{self, Write as _};
use std::ops::ControlFlow;
use std::os::fd::AsFd as _;

use anyhow::Context as _;
use clap::Args;

use super::advice;
use super::message::message;
use crate::sandbox::write_to;

/// Prints an error with its causes to stderr.
pub(super) fn report(error: &anyhow::Error) {
    let text = message(error);
    match advice::for_error(error) {
        Some(advice) => notice(&format!("{text}; {advice}")),
        None => notice(&text),
    }
}

/// Prints a message for the user that is not the command's result.
pub(super) fn notice(text: &str) {
    // There is nowhere left to report that stderr is closed.
    let _ = writeln!(io::stderr(), "podvisor: {text}");
}

/// Prints the last messages of a guest's kernel.
pub(super) fn notice_kernel_log(log: &[String]) {
    let mut stderr = io::stderr().lock();
    for line in log {
        // There is nowhere left to report that stderr is closed.
        let _ = writeln!(stderr, "guest: {line}");
    }
}

/// Writes a command's output. It is not an error if the reader has closed its end.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    print_on(text).map(drop)
}

/// Like [`print`], for continuous output: breaks if the reader has closed its end.
pub(super) fn print_on(text: &str) -> anyhow::Result<ControlFlow<()>> {
    write_on(text.as_bytes())
}

/// Like [`print_on`], for bytes.
pub(super) fn write_on(bytes: &[u8]) -> anyhow::Result<ControlFlow<()>> {
    match Stdout.write_all(bytes) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        done => {
            done.context("cannot write to stdout")?;
            Ok(ControlFlow::Continue(()))
        }
    }
}

/// This process's stdout, without a buffer. If another program has made the file that both share
/// non-blocking, it is waited for.
#[derive(Debug)]
pub(super) struct Stdout;

impl io::Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write_to(io::stdout().as_fd(), bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn to_json(value: &impl serde::Serialize) -> anyhow::Result<String> {
    let mut text = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    text.push('\n');
    Ok(text)
}

pub(super) fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    print(&to_json(value)?)
}

/// Output format of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// For people.
    Table,
    /// For scripts.
    Json,
}

pub(super) fn parse_format(text: &str) -> Result<Format, String> {
    match text {
        "table" => Ok(Format::Table),
        "json" => Ok(Format::Json),
        _ => Err(
            "write table or json; there are no templates: give --json, and take parts of it by jq"
                .to_owned(),
        ),
    }
}

#[derive(Debug, Args)]
pub(super) struct FormatArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,

    /// How to print: table or json
    #[arg(long, value_name = "FORMAT", default_value = "table", value_parser = parse_format)]
    format: Format,
}

impl FormatArgs {
    /// For tests.
    #[cfg(test)]
    pub(super) fn table() -> Self {
        Self {
            json: false,
            format: Format::Table,
        }
    }

    pub(super) fn is_json(&self) -> bool {
        self.json || self.format == Format::Json
    }
}

/// Of commands that print JSON in any case: what others take to do so is not refused.
#[derive(Debug, Args)]
pub(super) struct JsonArgs {
    #[arg(long, hide = true)]
    json: bool,

    #[arg(short, long, hide = true, value_name = "FORMAT", value_parser = parse_json_format)]
    format: Option<Format>,
}

pub(super) fn parse_json_format(text: &str) -> Result<Format, String> {
    match text {
        "json" => Ok(Format::Json),
        _ => Err("it prints JSON, of which jq takes parts; there are no templates".to_owned()),
    }
}
