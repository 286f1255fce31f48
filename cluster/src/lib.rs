//! KubeVirt's API over podvisor's VM pods.
//!
//! | room | what it is for |
//! | --- | --- |
//! | `certificates`, `https`, `scrape`, `status` | how servers are reached, and how they refuse |
//! | `front_proxy`, `discovery` | the API server before groups that it aggregates |
//! | `disk` | opens disks in volumes that others write to |
//! | `prometheus` | the text of metrics |
//! | `token` | what a component allows another by a signature |
//! | `contact` | what the API and a node's part know of each other |
//! | `node_client` | the way from the API and the controllers to a node's part |
//! | `served` | the group and the versions of the API, as clients see them |
//! | `termination` | what a container leaves to its kubelet when it fails |
//! | `objects` | the objects as the controllers see them, and whoever looks at one as they do |
//! | `installation` | the KubeVirt object, which all components of a cluster heed |
//! | `instancetypes` | instance types and preferences, for all that look at a VM with them |
//! | `admission` | the webhooks that default and validate the objects, an aggregated group |
//! | `api` | the aggregated groups `subresources.kubevirt.io` and `upload.cdi.kubevirt.io` |
//! | `controller` | VirtualMachine → instance → pod, snapshots and exports, DataVolume → claim and importer |
//! | `import` | the program of an importer: fills a claim |
//! | `copy` | copies of claims of other namespaces: who may make them, and how a disk is sent |
//! | `export` | the program of an exporter, which serves claims to who has a token |
//! | `upload` | tokens of uploads, and the proxy that takes them from outside |
//! | `node` | what runs beside each kubelet: carries out requests, reports the state of its VMs |
//! | `manifests` | what `podvisor-cluster install` prints |
//!
//! Nothing in here imports the VMM, the sandbox or the CRI: a node is known by its gRPC service
//! alone.

pub mod admission;
pub mod api;
mod certificates;
mod contact;
pub mod controller;
pub mod copy;
mod discovery;
mod disk;
pub mod export;
mod front_proxy;
mod https;
pub mod import;
mod installation;
mod instancetypes;
pub mod manifests;
pub mod node;
mod node_client;
pub mod objects;
mod prometheus;
mod scrape;
mod served;
mod shares;
mod status;
mod termination;
mod token;
mod typed;
pub mod upload;

pub use https::Listen;
