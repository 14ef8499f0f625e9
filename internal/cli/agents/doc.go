// Package agents has the commands of the two agents. Both programs have them: towline, and towline-agent, which links
// nothing else and therefore needs much less memory (program.go).
package agents
