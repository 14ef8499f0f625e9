package kube

import "math/bits"

// The memory of values in bytes, as the Go runtime allocates them. TestMemoryOfValues compares it with the heap.
const (
	// pointerMemory is the overhead of an object in a list: its pointer, and the struct to which that points.
	pointerMemory = 16
	// textMemory is the overhead of a text: its header, and the unused rest of its allocation.
	textMemory = 32
	// scalarMemory is a number in an interface and its JSON. The values true, false and null need less.
	scalarMemory = 32
	// listMemory is an empty list, and elementMemory an element. A list that was decoded has unused capacity.
	listMemory, elementMemory = 24, 24
	// mapMemory is a map without fields, and groupMemory the slots of one with up to eight. A larger map has slotMemory
	// for each of its slots, whose number is a power of two.
	mapMemory, groupMemory, slotMemory = 48, 288, 34
	maxGroup                           = 8
)

// escapedSize is the size in bytes of an escaped character in JSON.
const escapedSize = 6

// MemoryOfValue returns the memory of a decoded JSON value and of its JSON, in bytes.
func MemoryOfValue(value any) int64 {
	var size documentsSize
	size.add(value)
	return size.memory
}

// add adds a value and its JSON.
func (s *documentsSize) add(value any) {
	s.values++
	switch value := value.(type) {
	case map[string]any:
		s.memory += mapMemory + fieldsMemory(len(value))
		for key, field := range value {
			s.memory += memoryOfText(key)
			s.add(field)
		}
	case []any:
		s.memory += listMemory + int64(len(value))*elementMemory
		for _, element := range value {
			s.add(element)
		}
	case string:
		s.memory += memoryOfText(value)
	default:
		s.memory += scalarMemory
	}
}

// fieldsMemory returns the memory of a map for n fields, without the texts of their keys and their values.
func fieldsMemory(n int) int64 {
	switch {
	case n == 0:
		return 0
	case n <= maxGroup:
		return groupMemory
	}
	const usedSlots, allSlots = 7, 8 // a map grows when more than 7 of 8 slots are used
	return slotMemory << bits.Len(uint(n*allSlots/usedSlots))
}

// memoryOfText returns the memory of a text and of its JSON.
func memoryOfText(text string) int64 {
	escaped := 0
	for i := range len(text) {
		if c := text[i]; c < ' ' || c == '<' || c == '>' || c == '&' || c == '"' || c == '\\' {
			escaped++
		}
	}
	return textMemory + 2*int64(len(text)) + int64(escaped)*(escapedSize-1)
}
