//! `podvisor logs`: shows a container's output.
//!
//! This file has the command and reads the log files, also while they are written; `lines` makes
//! the program's lines of what they have, `time` parses the times that users give.

mod lines;
mod time;

use std::fs::File;
use std::future::pending;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context as _;
use clap::Args;
use futures_util::future::try_join_all;
use rustix::fs::inotify;
use tokio::io::unix::AsyncFd;

use super::state::unresponsive;
use super::{Entry, State, sweep};
use crate::cli::Globals;
use crate::cli::output::Stdout;
use lines::{Hold, LineStarts, LogLine, Prefix, Printer};
use podvisor_host::watch::readable;
pub(in crate::cli) use time::{parse_at, parse_time};

/// Maximum length of a log's line: its text has at most 16 KiB.
const LINE_MAX: u64 = 64 << 10;

#[derive(Debug, Args)]
pub(in crate::cli) struct LogsArgs {
    /// Follow the log
    #[arg(short, long)]
    follow: bool,

    /// Only what was written since then: 10m, 2026-01-31T12:00:00Z (or +02:00; UTC without a
    /// zone), or seconds since 1970
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<SystemTime>,

    /// Only what was written before then
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    until: Option<SystemTime>,

    /// Begin each line with its time
    #[arg(short, long)]
    timestamps: bool,

    /// Only so many of the last lines, or all
    #[arg(short = 'n', long, value_name = "LINES", default_value = "all")]
    #[arg(value_parser = parse_tail, allow_negative_numbers = true)]
    tail: Tail,

    /// Names or ids; of several, each line begins with a name
    #[arg(value_name = "CONTAINER", required = true)]
    containers: Vec<String>,
}

/// Number of lines from the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tail {
    All,
    Lines(usize),
}

fn parse_tail(text: &str) -> Result<Tail, String> {
    match text {
        "all" => Ok(Tail::All),
        // As in docker, a negative number means all.
        lines if lines.parse().is_ok_and(|lines: i64| lines < 0) => Ok(Tail::All),
        lines => lines
            .parse()
            .map(Tail::Lines)
            .map_err(|_| "write a number of lines, or all".to_owned()),
    }
}

/// Writes text to stderr or stdout.
type WriteText = fn(bool, &[u8]) -> io::Result<()>;

impl LogsArgs {
    /// Returns whether the times that are asked for include a line that begins with this piece.
    fn takes(&self, piece: &LogLine<'_>) -> bool {
        let Ok(time) = humantime::parse_rfc3339(piece.time) else {
            return false;
        };
        self.since.is_none_or(|since| time >= since) && self.until.is_none_or(|until| time < until)
    }

    /// Waits until the time of `--until`, or forever without one.
    async fn passed_until(&self) {
        match self.until {
            Some(until) => {
                let left = until.duration_since(SystemTime::now());
                tokio::time::sleep(left.unwrap_or_default()).await;
            }
            None => pending().await,
        }
    }

    /// Returns what prints the lines of this container.
    fn printer(&self, name: &str) -> Printer<WriteText> {
        let has_names = self.containers.len() > 1;
        let prefix = Prefix {
            name: has_names.then(|| name.to_owned()),
            has_time: self.timestamps,
        };
        // Without `--follow` one container is shown after the other.
        let hold = match has_names && self.follow {
            true => Hold::Lines,
            false => Hold::No,
        };
        Printer::new(prefix, hold, |is_stderr, text| match is_stderr {
            true => io::stderr().write_all(text),
            false => Stdout.write_all(text),
        })
    }
}

/// Reads a log file line by line; an incomplete line is kept until its rest is written.
struct Reader {
    path: PathBuf,
    file: BufReader<File>,
    begun: Vec<u8>,
}

impl Reader {
    fn open(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            file: BufReader::new(File::open(path)?),
            begun: Vec::new(),
        })
    }

    fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let room = LINE_MAX.saturating_sub(self.begun.len() as u64);
        let count = (&mut self.file)
            .take(room)
            .read_until(b'\n', &mut self.begun)?;
        if count == 0 && self.file.stream_position()? > self.file.get_ref().metadata()?.len() {
            // It was truncated and rewritten, twice since the last read.
            self.begun.clear();
            self.file.rewind()?;
            return self.next();
        }
        let is_whole = self.begun.last() == Some(&b'\n') || self.begun.len() as u64 >= LINE_MAX;
        Ok(is_whole.then(|| std::mem::take(&mut self.begun)))
    }
}

/// Returns the time of a file's first line, which determines the order of the files.
fn first_time(path: &Path) -> Option<String> {
    let line = Reader::open(path).ok()?.next().ok()??;
    Some(LogLine::parse(&line)?.time.to_owned())
}

/// Returns the log files that have lines, the older one first.
fn in_order(entry: &Entry) -> Vec<PathBuf> {
    let logs = entry.logs().into_iter();
    let mut logs: Vec<_> = logs
        .filter_map(|log| Some((first_time(&log)?, log)))
        .collect();
    logs.sort();
    logs.into_iter().map(|(_, log)| log).collect()
}

pub(in crate::cli) fn run(globals: &Globals, args: &LogsArgs) -> anyhow::Result<u8> {
    let containers = globals.containers()?;
    let runtime = crate::cli::runtime()?;
    let done = runtime.block_on(async {
        sweep(&containers).await?;
        let names = args.containers.iter();
        let entries: Vec<Entry> = names
            .map(|name| containers.find(name))
            .collect::<Result<_, _>>()?;
        if args.follow {
            try_join_all(entries.iter().map(|entry| show(args, entry))).await?;
        } else {
            for entry in &entries {
                show(args, entry).await?;
            }
        }
        Ok(())
    });
    match done {
        // The reader has closed its end.
        Err(error) if is_broken_pipe(&error) => Ok(0),
        done => done.map(|()| 0),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<io::Error>();
    io.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

async fn show(args: &LogsArgs, entry: &Entry) -> anyhow::Result<()> {
    let mut printer = args.printer(&entry.record.name);
    let shown = show_lines(args, entry, &mut printer).await;
    let finished = printer.finish();
    shown?;
    Ok(finished?)
}

async fn show_lines<W>(
    args: &LogsArgs,
    entry: &Entry,
    printer: &mut Printer<W>,
) -> anyhow::Result<()>
where
    W: FnMut(bool, &[u8]) -> io::Result<()>,
{
    let until = args.passed_until();
    tokio::pin!(until);
    let state = match args.follow {
        false => None,
        true => tokio::select! {
            biased;
            () = &mut until => None,
            // It is being started and has written nothing yet.
            state = State::once_started(entry) => Some(state?),
        },
    };
    // Watched before it is read, so that nothing is missed in between.
    let followed = match state {
        Some(state) => Some((state, watch_all(&entry.logs())?)),
        None => None,
    };
    let logs = in_order(entry);
    let mut skip = match args.tail {
        Tail::Lines(wanted) => lines_taken(args, &logs)?.saturating_sub(wanted),
        Tail::All => 0,
    };
    let mut takes = |first: &LogLine<'_>| {
        let is_taken = args.takes(first);
        let is_skipped = is_taken && skip > 0;
        skip -= usize::from(is_skipped);
        is_taken && !is_skipped
    };
    let mut copy = |reader: &mut Reader| -> anyhow::Result<()> {
        while let Some(line) = reader.next()? {
            if let Some(piece) = LogLine::parse(&line) {
                printer.print(&piece, &mut takes)?;
            }
        }
        Ok(())
    };
    let mut current = None;
    for log in &logs {
        let mut reader = Reader::open(log).context("cannot open the log")?;
        copy(&mut reader)?;
        current = Some(reader);
    }
    let Some((state, watched)) = followed else {
        return Ok(());
    };
    // Reads what was written since, in the current file and in the one that followed it.
    let mut go_on = || -> anyhow::Result<()> {
        let mut reader = match current.take() {
            Some(reader) => reader,
            None => match in_order(entry).first() {
                Some(first) => Reader::open(first).context("cannot open the log")?,
                None => return Ok(()),
            },
        };
        let newest = in_order(entry).pop();
        copy(&mut reader)?;
        if let Some(newest) = newest.filter(|newest| *newest != reader.path) {
            reader = Reader::open(&newest).context("cannot open the log")?;
            copy(&mut reader)?;
        }
        current = Some(reader);
        Ok(())
    };
    if let State::Unresponsive { pid } = state {
        return Err(unresponsive(entry, pid));
    }
    let Some(client) = state.client() else {
        return go_on();
    };
    let ended = entry.ended(client);
    tokio::pin!(ended);
    loop {
        tokio::select! {
            changed = watched.readable() => {
                let mut changed = changed?;
                drain(watched.get_ref())?;
                changed.clear_ready();
                go_on()?;
            }
            _ = &mut ended => return go_on(),
            () = &mut until => return go_on(),
        }
    }
}

/// Returns the number of lines that are asked for, whatever `--tail` says.
fn lines_taken(args: &LogsArgs, logs: &[PathBuf]) -> anyhow::Result<usize> {
    let mut count = 0;
    let mut starts = LineStarts::default();
    for log in logs {
        let mut reader = Reader::open(log)?;
        while let Some(line) = reader.next()? {
            let piece = LogLine::parse(&line);
            let is_taken = piece.is_some_and(|piece| starts.begins(&piece) && args.takes(&piece));
            count += usize::from(is_taken);
        }
    }
    Ok(count)
}

pub(super) fn watch(path: &Path) -> anyhow::Result<AsyncFd<OwnedFd>> {
    watch_all(&[path.to_owned()])
}

fn watch_all(paths: &[PathBuf]) -> anyhow::Result<AsyncFd<OwnedFd>> {
    let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
    let watched = inotify::init(flags).context("cannot watch files")?;
    for path in paths {
        inotify::add_watch(&watched, path, inotify::WatchFlags::MODIFY)
            .with_context(|| format!("cannot watch {}", path.display()))?;
    }
    Ok(readable(watched)?)
}

/// Discards pending notifications: only their occurrence matters.
pub(super) fn drain(watched: &OwnedFd) -> io::Result<()> {
    match rustix::io::read(watched, &mut [0; 4096]) {
        Err(error) if error != rustix::io::Errno::WOULDBLOCK => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches as _;

    use super::*;

    #[test]
    fn a_tail_is_a_number_of_lines_or_all() {
        assert_eq!(parse_tail("7"), Ok(Tail::Lines(7)));
        assert_eq!(parse_tail("0"), Ok(Tail::Lines(0)));
        for all in ["all", "-1", "-5"] {
            assert_eq!(parse_tail(all), Ok(Tail::All), "{all}");
        }
        for bad in ["", "-", "some", "1.5", "--1"] {
            assert!(parse_tail(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn since_a_time_are_the_lines_from_it_on_and_until_it_those_before() {
        let taken = |flags: &[&str]| {
            let words = [&["logs"], flags, &["one"]].concat();
            let command = LogsArgs::augment_args(clap::Command::new("logs"));
            let matches = command.try_get_matches_from(words).unwrap();
            let args = LogsArgs::from_arg_matches(&matches).unwrap();
            let takes = |second: &u8| {
                let line = format!("2026-01-31T12:00:0{second}.5Z stdout F x\n");
                args.takes(&LogLine::parse(line.as_bytes()).unwrap())
            };
            (1..5).filter(takes).collect::<Vec<_>>()
        };
        let [early, late] = ["2026-01-31T12:00:02.5Z", "2026-01-31T12:00:04.5Z"];
        assert_eq!(taken(&[]), [1, 2, 3, 4]);
        assert_eq!(taken(&["--since", early]), [2, 3, 4]);
        assert_eq!(taken(&["--until", early]), [1]);
        assert_eq!(taken(&["--since", early, "--until", late]), [2, 3]);
    }

    #[test]
    fn two_files_are_read_by_the_times_of_their_lines_and_one_that_is_begun_anew_from_there() {
        let root = tempfile::tempdir().unwrap();
        let containers = super::super::Containers::open(root.path()).unwrap();
        let record = super::super::record::sample("a", "one");
        let (entry, _claim) = containers.create(record).unwrap();
        let mut log = entry.open_log().unwrap();
        let mut other = entry.open_other_log().unwrap();
        assert!(in_order(&entry).is_empty());
        let line = |time: u8| format!("2026-01-31T12:00:0{time}.000000000Z stdout F {time}\n");
        let write = |file: &mut File, time: u8| file.write_all(line(time).as_bytes()).unwrap();
        write(&mut log, 1);
        write(&mut log, 2);
        write(&mut other, 3);
        let order = in_order(&entry);
        assert_eq!(order, entry.logs());
        let mut reader = Reader::open(&order[0]).unwrap();
        for time in [1, 2] {
            assert_eq!(reader.next().unwrap().unwrap(), line(time).as_bytes());
        }
        assert_eq!(reader.next().unwrap(), None);
        log.set_len(0).unwrap();
        write(&mut log, 4);
        assert_eq!(reader.next().unwrap().unwrap(), line(4).as_bytes());
        let now: Vec<_> = order.into_iter().rev().collect();
        assert_eq!(in_order(&entry), now);
    }
}
