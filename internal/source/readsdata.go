package source

import (
	"slices"
	templateparse "text/template/parse"
)

// readsData returns whether a node of a template may read the data of the template. Within range and with, the dot is
// another value, but counts as the data as well.
func readsData(node templateparse.Node) bool {
	switch n := node.(type) {
	case *templateparse.DotNode, *templateparse.FieldNode:
		return true
	case *templateparse.VariableNode:
		return n.Ident[0] == "$"
	case *templateparse.ChainNode:
		return readsData(n.Node)
	case *templateparse.CommandNode:
		return slices.ContainsFunc(n.Args, readsData)
	case *templateparse.PipeNode:
		return n != nil && slices.ContainsFunc(n.Cmds, func(command *templateparse.CommandNode) bool { return readsData(command) })
	case *templateparse.ActionNode:
		return readsData(n.Pipe)
	case *templateparse.TemplateNode:
		return readsData(n.Pipe)
	case *templateparse.ListNode:
		return n != nil && slices.ContainsFunc(n.Nodes, readsData)
	default:
		return branchReadsData(node)
	}
}

// branchReadsData is readsData for if, range and with. It returns false for texts, literals and functions.
func branchReadsData(node templateparse.Node) bool {
	var branch *templateparse.BranchNode
	switch n := node.(type) {
	case *templateparse.IfNode:
		branch = &n.BranchNode
	case *templateparse.RangeNode:
		branch = &n.BranchNode
	case *templateparse.WithNode:
		branch = &n.BranchNode
	default:
		return false
	}
	return readsData(branch.Pipe) || readsData(branch.List) || readsData(branch.ElseList)
}
