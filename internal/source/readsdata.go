package source

import (
	"slices"
	templateparse "text/template/parse"
)

// reads is the data of a template that a node may read.
type reads struct{ cluster, resources bool }

func (r reads) or(others ...reads) reads {
	for _, other := range others {
		r.cluster, r.resources = r.cluster || other.cluster, r.resources || other.resources
	}
	return r
}

// dataReader finds the data that a template reads.
type dataReader struct {
	// isDotCounted is true where the dot is a value that was read before: in a range or with, or in a template that is
	// called with a value.
	isDotCounted bool
}

// readsOf returns the data that node may read.
func (d dataReader) readsOf(node templateparse.Node) reads {
	switch n := node.(type) {
	case *templateparse.DotNode:
		return reads{cluster: !d.isDotCounted, resources: !d.isDotCounted}
	case *templateparse.FieldNode:
		return d.fieldReads(n.Ident)
	case *templateparse.VariableNode:
		if n.Ident[0] != "$" {
			return reads{} // it was read before
		}
		return dataReader{}.fieldReads(n.Ident[1:])
	case *templateparse.IdentifierNode:
		return reads{resources: slices.Contains(resourceFunctions(), n.Ident)}
	case *templateparse.ChainNode:
		return d.readsOf(n.Node)
	case *templateparse.CommandNode:
		return readsOfAll(d, n.Args)
	case *templateparse.PipeNode:
		if n == nil {
			return reads{}
		}
		return readsOfAll(d, n.Cmds)
	case *templateparse.ActionNode:
		return d.readsOf(n.Pipe)
	case *templateparse.TemplateNode:
		return d.readsOf(n.Pipe)
	case *templateparse.ListNode:
		if n == nil {
			return reads{}
		}
		return readsOfAll(d, n.Nodes)
	default:
		return d.branchReads(node)
	}
}

// fieldReads returns the data that a field of the dot reads.
func (d dataReader) fieldReads(names []string) reads {
	switch {
	case len(names) > 0 && names[0] == resourcesField:
		return reads{resources: true}
	case len(names) > 0 && slices.Contains([]string{"Cluster", "ClusterNamespace", "ClusterName"}, names[0]):
		return reads{cluster: true}
	default:
		return reads{cluster: !d.isDotCounted, resources: !d.isDotCounted}
	}
}

// branchReads is readsOf for if, range and with. It returns nothing for texts and literals.
func (d dataReader) branchReads(node templateparse.Node) reads {
	body := d
	var branch *templateparse.BranchNode
	switch n := node.(type) {
	case *templateparse.IfNode:
		branch = &n.BranchNode
	case *templateparse.RangeNode:
		branch, body.isDotCounted = &n.BranchNode, true
	case *templateparse.WithNode:
		branch, body.isDotCounted = &n.BranchNode, true
	default:
		return reads{}
	}
	return d.readsOf(branch.Pipe).or(body.readsOf(branch.List), d.readsOf(branch.ElseList))
}

func readsOfAll[N templateparse.Node](d dataReader, nodes []N) reads {
	var all reads
	for _, node := range nodes {
		all = all.or(d.readsOf(node))
	}
	return all
}
