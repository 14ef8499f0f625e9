package source

import (
	"slices"
	templateparse "text/template/parse"
)

// dataAccess lists the fields of the TemplateContext that a node of a template may read.
type dataAccess struct{ cluster, resources bool }

func (r dataAccess) or(others ...dataAccess) dataAccess {
	for _, other := range others {
		r.cluster, r.resources = r.cluster || other.cluster, r.resources || other.resources
	}
	return r
}

// accessFinder computes the dataAccess of the nodes of a template.
type accessFinder struct {
	// isDotCounted is true in the body of range, with and define: there, the dot is the value of a pipeline, whose access
	// is already counted.
	isDotCounted bool
}

// accessOf returns the access of node and of all nodes in it.
func (d accessFinder) accessOf(node templateparse.Node) dataAccess {
	switch n := node.(type) {
	case *templateparse.DotNode:
		return dataAccess{cluster: !d.isDotCounted, resources: !d.isDotCounted}
	case *templateparse.FieldNode:
		return d.fieldAccess(n.Ident)
	case *templateparse.VariableNode:
		if n.Ident[0] != "$" {
			return dataAccess{} // a variable, whose value is already counted
		}
		return accessFinder{}.fieldAccess(n.Ident[1:])
	case *templateparse.IdentifierNode:
		return dataAccess{resources: slices.Contains(resourceFunctionNames(), n.Ident)}
	case *templateparse.ChainNode:
		return d.accessOf(n.Node)
	case *templateparse.CommandNode:
		return accessOfAll(d, n.Args)
	case *templateparse.PipeNode:
		if n == nil {
			return dataAccess{}
		}
		return accessOfAll(d, n.Cmds)
	case *templateparse.ActionNode:
		return d.accessOf(n.Pipe)
	case *templateparse.TemplateNode:
		return d.accessOf(n.Pipe)
	case *templateparse.ListNode:
		if n == nil {
			return dataAccess{}
		}
		return accessOfAll(d, n.Nodes)
	default:
		return d.branchAccess(node)
	}
}

// fieldAccess returns the access of a field of the dot.
func (d accessFinder) fieldAccess(names []string) dataAccess {
	switch {
	case len(names) > 0 && names[0] == resourcesField:
		return dataAccess{resources: true}
	case len(names) > 0 && slices.Contains([]string{"Cluster", "ClusterNamespace", "ClusterName"}, names[0]):
		return dataAccess{cluster: true}
	default:
		return dataAccess{cluster: !d.isDotCounted, resources: !d.isDotCounted}
	}
}

// branchAccess is accessOf for if, range and with. Other nodes, such as texts and literals, read nothing.
func (d accessFinder) branchAccess(node templateparse.Node) dataAccess {
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
		return dataAccess{}
	}
	return d.accessOf(branch.Pipe).or(body.accessOf(branch.List), d.accessOf(branch.ElseList))
}

func accessOfAll[N templateparse.Node](d accessFinder, nodes []N) dataAccess {
	var all dataAccess
	for _, node := range nodes {
		all = all.or(d.accessOf(node))
	}
	return all
}
