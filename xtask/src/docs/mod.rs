//! The documentation: `cargo xtask book` builds it as a book, and `cargo xtask test` checks that
//! its links and the places that it names lead somewhere.
//!
//! | file | contents |
//! | --- | --- |
//! | `links` | links of one page, and the anchors that a page has |
//! | `places` | paths of the tree in the table of what to change where |

mod links;
mod places;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::report::Step;
use crate::{cargo, paths, process};

/// The page whose table says what to change where.
const ARCHITECTURE: &str = "docs/architecture.md";

/// The version of mdBook that the book is built with.
const MDBOOK: &str = "0.4.52";

/// Builds the book into `target/book`.
pub(crate) fn book() -> Result<()> {
    check()?;
    let mdbook = mdbook()?;
    let step = Step::begin("building the book");
    process::run(
        process::tied(mdbook)
            .arg("build")
            .arg(paths::root().join("docs"))
            .stdin(Stdio::null()),
    )?;
    step.done();
    println!(
        "{}",
        paths::display(&paths::target().join("book/index.html"))
    );
    Ok(())
}

/// Returns mdBook's program, which is built the first time.
fn mdbook() -> Result<PathBuf> {
    let root = paths::target().join("tools/mdbook");
    let program = root.join("bin/mdbook");
    if program.exists() {
        return Ok(program);
    }
    let step = Step::begin("building mdBook (some minutes, once)");
    process::run(
        process::tied(cargo::program())
            .args(["install", "--quiet", "--locked", "--no-default-features"])
            .args(["mdbook", "--version", MDBOOK, "--root"])
            .arg(&root)
            .stdin(Stdio::null()),
    )
    .context("mdBook comes from crates.io: is it reachable?")?;
    step.done();
    Ok(program)
}

/// Checks that each link of a page to another file or heading of this tree leads to one, that each
/// page of the book is in its table of contents, and that the places that [`ARCHITECTURE`] names
/// exist.
pub(crate) fn check() -> Result<()> {
    let pages = pages()?;
    let mut texts = BTreeMap::new();
    for page in &pages {
        let path = paths::root().join(page);
        let text = fs::read_to_string(&path)
            .with_context(|| format!("{} cannot be read", path.display()))?;
        texts.insert(page.clone(), text);
    }
    let mut broken = Vec::new();
    for (page, text) in &texts {
        for link in links::of(text) {
            if let Err(reason) = resolve(page, link.target, &texts) {
                broken.push(format!("{}:{}: {reason}", page.display(), link.line));
            }
        }
    }
    for page in missing_from_contents(&texts) {
        broken.push(format!("docs/SUMMARY.md: {} is missing", page.display()));
    }
    broken.extend(missing_places(&texts)?);
    if broken.is_empty() {
        return Ok(());
    }
    bail!("links that lead nowhere:\n{}", broken.join("\n"))
}

/// Returns all Markdown pages that are part of the documentation, relative to the root.
fn pages() -> Result<Vec<PathBuf>> {
    let mut found = vec![PathBuf::from("README.md"), PathBuf::from("CHANGELOG.md")];
    for top in ["docs", "deploy"] {
        let mut directories = vec![PathBuf::from(top)];
        while let Some(directory) = directories.pop() {
            let path = paths::root().join(&directory);
            let entries = fs::read_dir(&path)
                .with_context(|| format!("{} cannot be read", path.display()))?;
            for entry in entries {
                let entry = entry?;
                let name = directory.join(entry.file_name());
                if entry.file_type()?.is_dir() {
                    directories.push(name);
                } else if name.extension().is_some_and(|extension| extension == "md") {
                    found.push(name);
                }
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Pages below `docs/` to which the table of contents has no link.
fn missing_from_contents(texts: &BTreeMap<PathBuf, String>) -> Vec<PathBuf> {
    let contents = PathBuf::from("docs/SUMMARY.md");
    let linked: BTreeSet<PathBuf> = texts
        .get(&contents)
        .map(|text| links::of(text))
        .unwrap_or_default()
        .iter()
        .filter_map(|link| normal(&Path::new("docs").join(link.target)))
        .collect();
    let is_page = |page: &&PathBuf| page.starts_with("docs") && **page != contents;
    let pages = texts.keys().filter(is_page);
    pages
        .filter(|page| !linked.contains(*page))
        .cloned()
        .collect()
}

/// Places of the table of what to change where that do not exist.
fn missing_places(texts: &BTreeMap<PathBuf, String>) -> Result<Vec<String>> {
    let text = texts.get(Path::new(ARCHITECTURE));
    let named = text.map(|text| places::of(text)).unwrap_or_default();
    if named.is_empty() {
        return Ok(vec![format!("{ARCHITECTURE}: it names no place to change")]);
    }
    let tree = places::Tree::read(paths::root()).context("the tree cannot be read")?;
    let missing = named.iter().filter_map(|place| {
        let reason = tree.resolve(place.path).err()?;
        Some(format!("{ARCHITECTURE}:{}: {reason}", place.line))
    });
    Ok(missing.collect())
}

/// Follows a link of `page`.
fn resolve(
    page: &Path,
    target: &str,
    texts: &BTreeMap<PathBuf, String>,
) -> std::result::Result<(), String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return Ok(());
    }
    let (file, anchor) = match target.split_once('#') {
        Some((file, anchor)) => (file, Some(anchor)),
        None => (target, None),
    };
    let file = match file {
        "" => page.to_owned(),
        file => {
            let beside = page.parent().unwrap_or(Path::new("")).join(file);
            normal(&beside).ok_or_else(|| format!("{target:?} leads out of the tree"))?
        }
    };
    if !paths::root().join(&file).exists() {
        return Err(format!("{target:?}: there is no {}", file.display()));
    }
    let Some(anchor) = anchor else {
        return Ok(());
    };
    match texts.get(&file) {
        Some(text) if links::anchors(text).contains(anchor) => Ok(()),
        Some(_) => Err(format!(
            "{target:?}: {} has no heading for it",
            file.display()
        )),
        None => Err(format!("{target:?}: {} has no headings", file.display())),
    }
}

/// Resolves `.` and `..`; `None` if the path leads out of the tree.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => normal.push(name),
            Component::CurDir => {}
            Component::ParentDir => {
                if !normal.pop() {
                    return None;
                }
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(normal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_resolved_within_the_tree() {
        let normal = |path: &str| normal(Path::new(path));
        assert_eq!(normal("docs/adr/../a.md"), Some("docs/a.md".into()));
        assert_eq!(normal("docs/./a.md"), Some("docs/a.md".into()));
        assert_eq!(normal("../a.md"), None);
        assert_eq!(normal("/a.md"), None);
    }

    #[test]
    fn pages_that_no_contents_name_are_found() {
        let texts = BTreeMap::from([
            ("docs/SUMMARY.md".into(), "- [A](a.md)\n".to_owned()),
            ("docs/a.md".into(), String::new()),
            ("docs/b.md".into(), String::new()),
            ("README.md".into(), String::new()),
        ]);
        assert_eq!(missing_from_contents(&texts), [PathBuf::from("docs/b.md")]);
    }

    #[test]
    fn links_lead_somewhere() {
        check().unwrap();
    }
}
