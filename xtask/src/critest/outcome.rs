//! The suite's report, and its table. Ginkgo writes a list of suites as JSON, each with a report
//! of every spec.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result};
use serde_json::Value;

/// Specs that cannot pass here, by a part of their name, and why.
const CANNOT_PASS: &[(&str, &str)] = &[
    (
        "runtime should support HostIpc is true",
        "a pod's processes are in a guest, not in the node's IPC namespace",
    ),
    (
        "runtime should support HostNetwork is true",
        "a guest has its own network; --host-runtime takes such pods",
    ),
    (
        "runtime should support portforward in host network",
        "a guest has its own network; --host-runtime takes such pods",
    ),
    (
        "mount with 'rshared' should support propagation from host to container and vice versa",
        "mounts of a guest do not appear on the node",
    ),
    ("AppArmor", "the host has no AppArmor"),
    (
        "runtime should support MaskedPaths",
        "the image: the shell of Debian's busybox has its own ls",
    ),
    (
        "public image with digest should be pulled and removed",
        "the image: its digest is that of the official one",
    ),
];

/// What became of a spec.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Passed,
    Failed(String),
    /// The suite says why.
    Skipped(String),
    NotSelected,
}

#[derive(Debug, PartialEq, Eq)]
struct Spec {
    name: String,
    state: State,
}

impl Spec {
    fn parse(report: &Value) -> Option<Self> {
        if report["LeafNodeType"] != "It" {
            // A set-up of the whole suite is worth a line only if it failed.
            let failed = report["State"] == "failed" || report["State"] == "panicked";
            return failed.then(|| Self {
                name: format!("[{}]", text(&report["LeafNodeType"])),
                state: State::Failed(message(report)),
            });
        }
        let groups = report["ContainerHierarchyTexts"].as_array();
        let groups = groups.into_iter().flatten().map(text);
        let mut words: Vec<&str> = groups.collect();
        words.push(text(&report["LeafNodeText"]));
        let state = match text(&report["State"]) {
            "passed" => State::Passed,
            "skipped" if message(report).is_empty() => State::NotSelected,
            "pending" => State::NotSelected,
            "skipped" => State::Skipped(message(report)),
            _ => State::Failed(message(report)),
        };
        Some(Self {
            name: words.join(" "),
            state,
        })
    }

    /// Returns why the spec cannot pass, if it cannot.
    fn reason(&self) -> Option<&'static str> {
        let known = CANNOT_PASS
            .iter()
            .find(|(part, _)| self.name.contains(part));
        known.map(|(_, reason)| *reason)
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns the first lines of a failure's message, as one.
fn message(report: &Value) -> String {
    let words = text(&report["Failure"]["Message"]).split_whitespace();
    let line = words.collect::<Vec<_>>().join(" ");
    line.chars().take(300).collect()
}

/// The result of a run.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    specs: Vec<Spec>,
}

impl Outcome {
    pub(super) fn parse(json: &str) -> Result<Self> {
        let suites: Value = serde_json::from_str(json)?;
        let suites = suites.as_array().context("no list of suites")?;
        let reports = suites
            .iter()
            .filter_map(|suite| suite["SpecReports"].as_array())
            .flatten();
        let mut specs: Vec<Spec> = reports.filter_map(Spec::parse).collect();
        specs.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { specs })
    }

    /// Returns whether nothing failed but what cannot pass, and anything ran.
    pub(super) fn is_as_expected(&self) -> bool {
        let ran = self.count(|spec| spec.state == State::Passed) > 0;
        ran && self.unexpected().next().is_none()
    }

    fn count(&self, what: impl Fn(&Spec) -> bool) -> usize {
        self.specs.iter().filter(|spec| what(spec)).count()
    }

    fn unexpected(&self) -> impl Iterator<Item = (&Spec, &str)> {
        self.failed().filter(|(spec, _)| spec.reason().is_none())
    }

    fn failed(&self) -> impl Iterator<Item = (&Spec, &str)> {
        self.specs.iter().filter_map(|spec| match &spec.state {
            State::Failed(message) => Some((spec, message.as_str())),
            _ => None,
        })
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unexpected = self.unexpected().count();
        if unexpected > 0 {
            writeln!(f, "failed:")?;
        }
        for (spec, message) in self.unexpected() {
            writeln!(f, "  {}\n      {message}", spec.name)?;
        }
        let known = self.failed();
        let known = known.filter_map(|(spec, _)| Some((spec.reason()?, spec)));
        write_by_reason(f, "cannot pass here:", known)?;
        let skipped = self.specs.iter().filter_map(|spec| match &spec.state {
            State::Skipped(reason) => Some((reason.as_str(), spec)),
            _ => None,
        });
        write_by_reason(f, "skipped by the suite:", skipped)?;
        let passed = self.count(|spec| spec.state == State::Passed);
        let skipped = self.count(|spec| matches!(spec.state, State::Skipped(_)));
        let not_selected = self.count(|spec| spec.state == State::NotSelected);
        let cannot = self.failed().count() - unexpected;
        writeln!(
            f,
            "{passed} passed, {unexpected} failed, {cannot} cannot pass here, {skipped} skipped, \
             {not_selected} not selected"
        )
    }
}

/// Writes the names of specs below the reason that they have in common.
fn write_by_reason<'a>(
    f: &mut fmt::Formatter<'_>,
    title: &str,
    specs: impl Iterator<Item = (&'a str, &'a Spec)>,
) -> fmt::Result {
    let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (reason, spec) in specs {
        by_reason.entry(reason).or_default().push(&spec.name);
    }
    if !by_reason.is_empty() {
        writeln!(f, "{title}")?;
    }
    for (reason, names) in by_reason {
        writeln!(f, "  {reason}")?;
        for name in names {
            writeln!(f, "      {name}")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(kind: &str, name: &str, state: &str, message: &str) -> Value {
        json!({
            "ContainerHierarchyTexts": ["[k8s.io] Security Context", "NamespaceOption"],
            "LeafNodeType": kind,
            "LeafNodeText": name,
            "State": state,
            "Failure": { "Message": message },
        })
    }

    fn outcome(reports: &[Value]) -> Outcome {
        Outcome::parse(&json!([{ "SpecReports": reports }]).to_string()).unwrap()
    }

    #[test]
    fn a_spec_that_cannot_pass_is_named_with_its_reason_and_is_no_failure() {
        let host_network = "runtime should support HostNetwork is true";
        let found = outcome(&[
            report("BeforeSuite", "", "passed", ""),
            report("It", "runs", "passed", ""),
            report("It", host_network, "failed", "unexpected\n  address"),
            report("It", "of another runtime", "skipped", "no such feature"),
            report("It", "benchmark", "skipped", ""),
        ]);
        assert!(found.is_as_expected());
        let text = found.to_string();
        assert!(text.contains("cannot pass here:\n"), "{text}");
        assert!(text.contains("--host-runtime takes such pods"), "{text}");
        let skipped =
            "  no such feature\n      [k8s.io] Security Context NamespaceOption of another";
        assert!(text.contains(skipped), "{text}");
        let last = "1 passed, 0 failed, 1 cannot pass here, 1 skipped, 1 not selected\n";
        assert!(text.ends_with(last), "{text}");
    }

    #[test]
    fn any_other_failure_is_one_and_its_message_is_one_line() {
        let found = outcome(&[
            report("It", "runs", "passed", ""),
            report("It", "stops", "timedout", "two\n   lines"),
        ]);
        assert!(!found.is_as_expected());
        let text = found.to_string();
        let spec = "  [k8s.io] Security Context NamespaceOption stops\n      two lines\n";
        assert!(text.starts_with(&format!("failed:\n{spec}")), "{text}");
        assert!(!outcome(&[report("BeforeSuite", "", "failed", "no socket")]).is_as_expected());
    }

    #[test]
    fn a_run_without_any_spec_is_a_failure_and_so_is_what_is_no_report() {
        assert!(!outcome(&[report("It", "runs", "skipped", "")]).is_as_expected());
        assert!(Outcome::parse("{}").is_err());
        assert!(Outcome::parse("").is_err());
    }
}
