//! Who imports whom in a crate. A name that a module passes on is taken from where it is defined.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::source::{Token, tokens};

/// The path of a module in its crate, or of something in a module.
type Names = Vec<String>;

/// Most modules that a name is followed through.
const MOST_STEPS: usize = 8;

/// One import of a file.
#[derive(Debug)]
pub(crate) struct Import {
    /// The file, from the crate's source.
    pub(crate) file: String,
    /// The module that imports.
    pub(crate) from: Names,
    /// The module that defines what is imported.
    pub(crate) to: Names,
    /// What is imported.
    pub(crate) name: String,
}

/// The imports of a crate.
#[derive(Debug)]
pub(crate) struct Imports(Vec<Import>);

/// A path in a file, from the crate's root.
#[derive(Debug)]
struct Use {
    path: Names,
    /// The name that a `use` gives it; none for a path elsewhere.
    bound: Option<String>,
}

/// What a name that a `use` binds in a module means: a path, or something of another crate.
type Bound = BTreeMap<(Names, String), Option<Names>>;

impl Imports {
    /// Reads the crate with this source directory; files of tests do not count.
    pub(crate) fn of(root: &Path) -> Self {
        let mut files = Vec::new();
        read(root, root, &mut files);
        let files = files
            .iter()
            .map(|(path, text)| (path.as_str(), text.as_str()));
        Self::of_files(files)
    }

    /// As [`Self::of`], of a crate with these files.
    pub(crate) fn of_files<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let files: Vec<_> = files
            .into_iter()
            .map(|(path, text)| (path.to_owned(), module_of(path), tokens(text)))
            .collect();
        let modules: BTreeSet<Names> = files.iter().map(|(_, module, _)| module.clone()).collect();
        let mut bound = Bound::new();
        let mut used = Vec::new();
        for (path, module, tokens) in &files {
            for (names, alias) in uses(tokens) {
                let absolute = absolute(&names, module, &modules);
                if let Some(alias) = &alias {
                    bound.insert((module.clone(), alias.clone()), absolute.clone());
                }
                if let Some(absolute) = absolute {
                    let bound = alias;
                    used.push((
                        path,
                        module,
                        Use {
                            path: absolute,
                            bound,
                        },
                    ));
                }
            }
        }
        let imports = used.into_iter().filter_map(|(file, from, one)| {
            let own = one.bound.map(|name| (from.clone(), name));
            let to = defined(&one.path, &modules, &bound, own.as_ref())?;
            Some(Import {
                file: file.clone(),
                from: from.clone(),
                to,
                name: one.path.last().cloned().unwrap_or_default(),
            })
        });
        Self(imports.collect())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Import> {
        self.0.iter()
    }
}

fn read(root: &Path, dir: &Path, files: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let is_of_tests = ["tests", "testing"].contains(&name)
            || ["tests.rs", "testing.rs"]
                .iter()
                .any(|end| name.ends_with(end));
        if is_of_tests {
            continue;
        }
        if path.is_dir() {
            read(root, &path, files);
        } else if name.ends_with(".rs") {
            let inside = path.strip_prefix(root).unwrap().to_str().unwrap();
            files.push((inside.to_owned(), fs::read_to_string(&path).unwrap()));
        }
    }
}

fn module_of(path: &str) -> Names {
    let path = path.strip_suffix(".rs").unwrap();
    let mut names: Names = path.split('/').map(str::to_owned).collect();
    names.pop_if(|last| ["mod", "lib", "main"].contains(&last.as_str()));
    names
}

/// Returns a path from the crate's root; none for what is of another crate.
fn absolute(names: &[String], module: &[String], modules: &BTreeSet<Names>) -> Option<Names> {
    let (first, rest) = names.split_first()?;
    let mut base = module.to_vec();
    let mut rest = rest;
    match first.as_str() {
        "crate" => base.clear(),
        "self" => {}
        "super" => {
            base.pop();
            while let Some((next, after)) = rest.split_first()
                && next == "super"
            {
                base.pop();
                rest = after;
            }
        }
        child => {
            base.push(child.to_owned());
            if !modules.contains(&base) {
                return None;
            }
        }
    }
    base.extend_from_slice(rest);
    Some(base)
}

/// Returns the module that defines what a path leads to. The name that the path's own `use` binds
/// is not looked at.
fn defined(
    path: &[String],
    modules: &BTreeSet<Names>,
    bound: &Bound,
    own: Option<&(Names, String)>,
) -> Option<Names> {
    let mut path = path.to_vec();
    for _ in 0..MOST_STEPS {
        let inner = (0..=path.len())
            .rev()
            .find(|len| modules.contains(&path[..*len]))?;
        let module = path[..inner].to_vec();
        let Some(name) = path.get(inner) else {
            return Some(module);
        };
        let key = (module, name.clone());
        match bound.get(&key) {
            Some(_) if own == Some(&key) => return Some(key.0),
            // It is of another crate.
            Some(None) => return None,
            Some(Some(further)) => {
                let mut further = further.clone();
                further.extend_from_slice(&path[inner + 1..]);
                path = further;
            }
            None => return Some(key.0),
        }
    }
    None
}

/// Returns the paths of a file: those of each `use` with the name that it binds, and those
/// elsewhere that begin with `crate`, `super` or `self`.
fn uses(tokens: &[Token]) -> Vec<(Names, Option<String>)> {
    let is_name =
        |at: usize, name: &str| matches!(tokens.get(at), Some(Token::Name(found)) if found == name);
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let is_root = ["crate", "super", "self"]
            .iter()
            .any(|root| is_name(at, root));
        let is_visibility = at > 0
            && (is_name(at - 1, "in") || tokens[at - 1] == Token::Sign('('))
            && tokens[..at]
                .iter()
                .rev()
                .take(3)
                .any(|token| *token == Token::Name("pub".into()));
        if is_name(at, "use") {
            at += 1;
            tree(tokens, &mut at, &[], &mut found);
        } else if is_root && !is_visibility && tokens.get(at + 1) == Some(&Token::Path) {
            let mut names = Names::new();
            while let Some(Token::Name(name)) = tokens.get(at) {
                names.push(name.clone());
                at += 1;
                if tokens.get(at) != Some(&Token::Path) {
                    break;
                }
                at += 1;
            }
            found.push((names, None));
        } else {
            at += 1;
        }
    }
    found
}

/// Reads the tree of a `use`.
fn tree(
    tokens: &[Token],
    at: &mut usize,
    before: &[String],
    found: &mut Vec<(Names, Option<String>)>,
) {
    let mut names = before.to_vec();
    loop {
        match tokens.get(*at) {
            Some(Token::Name(name)) => {
                names.push(name.clone());
                *at += 1;
            }
            Some(Token::Sign('*')) => {
                *at += 1;
                return found.push((names, None));
            }
            Some(Token::Sign('{')) => {
                *at += 1;
                while !matches!(tokens.get(*at), None | Some(Token::Sign('}'))) {
                    let begin = *at;
                    tree(tokens, at, &names, found);
                    if tokens.get(*at) == Some(&Token::Sign(',')) || *at == begin {
                        *at += 1;
                    }
                }
                *at += 1;
                return;
            }
            _ => return,
        }
        if tokens.get(*at) != Some(&Token::Path) {
            break;
        }
        *at += 1;
    }
    // `a::{self}` is `a`.
    if names.len() > 1 {
        names.pop_if(|last| last == "self");
    }
    let mut bound = names.last().cloned();
    if tokens.get(*at) == Some(&Token::Name("as".to_owned())) {
        *at += 1;
        if let Some(Token::Name(alias)) = tokens.get(*at) {
            bound = Some(alias.clone());
            *at += 1;
        }
    }
    found.push((names, bound));
}
